from __future__ import annotations

import json

from benchmarks.compare_aiconfigurator import MODELS, STAND_INS, inspect, stand_in, stand_in_folder

(GLM,) = STAND_INS


def test_the_stand_in_has_the_layers_heads_and_experts_of_the_model():
    model = inspect(GLM)
    assert GLM in MODELS
    config = json.loads((stand_in_folder(GLM) / "config.json").read_text(encoding="utf-8"))
    assert (config["num_hidden_layers"], config["hidden_size"]) == (model.num_layers, model.hidden_size)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (96, 8)
    assert (config["num_experts"], config["num_experts_per_tok"]) == (model.num_experts, model.top_k)
    assert model.num_layers - config["first_k_dense_replace"] == len(model.moe_layers)
    # Every layer attends to all tokens: no sliding window.
    assert set(config["layer_types"]) == {"full_attention"}
    assert len(config["layer_types"]) == model.num_layers


def test_shared_experts_are_one_of_their_width_together():
    glm = json.loads((stand_in_folder(GLM) / "config.json").read_text(encoding="utf-8"))
    assert glm["share_expert_dim"] == glm["moe_intermediate_size"] == 1408
    own = glm | {"n_routed_experts": 128, "n_shared_experts": 2}
    assert stand_in(own)["share_expert_dim"] == 2 * 1408
