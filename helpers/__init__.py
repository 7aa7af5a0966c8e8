"""Attention, prefixes and T5 prefix tuning: what the lessons build, to import."""

from importlib import import_module

# Each public name and the module that holds it. A module is imported when one of its names is first used,
# so that `import helpers` loads neither transformers nor matplotlib.
_MODULE_OF = {
    "split_heads": "heads",
    "merge_heads": "heads",
    "causal_mask": "masks",
    "padding_mask": "masks",
    "scaled_dot_product_attention": "attention",
    "MultiHeadAttention": "attention",
    "PrefixEncoder": "prefix",
    "join_prefix": "prefix",
    "split_prefix": "prefix",
    "Prefix": "tuning.attach",
    "T5Prefix": "tuning.attach",
    "PrefixPerRow": "tuning.attach",
    "ModelWithPrefix": "tuning.engines",
    "T5WithPrefix": "tuning.engines",
    "detach_prefix": "tuning.routing",
    "content_attentions": "tuning.maps",
    "LeanT5": "tuning.lean_t5",
    "PeftPrefix": "tuning.peft_prefix",
    "PeftT5Prefix": "tuning.peft_prefix",
    "from_peft": "tuning.peft_prefix",
    "to_peft": "tuning.peft_prefix",
    "fit": "tuning.training",
    "generate_texts": "tuning.training",
    "exact_match": "tuning.training",
    "load_base": "bases.load",
    "load_task": "bases.tasks",
    "task_names": "bases.tasks",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'helpers' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"helpers.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
