# What this project uses of transformers: of the package's own __init__, pyright reads 2,500 modules for any name.
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModel as AutoModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM

__version__: str
