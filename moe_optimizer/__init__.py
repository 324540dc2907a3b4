"""moe-optimizer: plan, apply and prove Mixture-of-Experts optimizations on stock vLLM.

Importing this package imports nothing else: every entry point pays only for what it uses.
"""

__version__ = "0.1.0"
__all__ = ["ModelInspector"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from moe_optimizer.inspection.model_inspector import ModelInspector


def __getattr__(name: str) -> object:
    if name in __all__:
        from moe_optimizer.inspection import model_inspector

        return getattr(model_inspector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
