"""A frozen model and its prefix as one module, for engines that train a model's parameters."""

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer

from helpers._checks import warn_caller
from helpers.tuning.attach import Prefix, PrefixPerRow
from helpers.tuning.families import sites_of
from helpers.tuning.hub import upload
from helpers.tuning.sharded import gather_for, spread_again
from helpers.tuning.store import check_names, check_serialization, read, write

# What a ModelWithPrefix lets the model inside answer: by who asks for it.
_ANSWERED_BY_THE_MODEL = frozenset(
    """
    config generation_config device dtype main_input_name can_generate loss_type
    get_encoder get_decoder get_output_embeddings compute_transition_scores prepare_decoder_input_ids_from_labels

    activation_checkpointing_enable activation_checkpointing_disable is_activation_checkpointing
    gradient_checkpointing_enable gradient_checkpointing_disable is_gradient_checkpointing
    supports_gradient_checkpointing enable_input_require_grads disable_input_require_grads

    hf_device_map hf_quantizer quantization_method is_loaded_in_8bit is_loaded_in_4bit tie_weights
    tp_size _tp_size is_distributed_loading_by_transformers set_requires_gradient_sync set_requires_all_reduce
    _no_split_modules
    """.split()  # people and collators; checkpointing; where Trainer and accelerate put the weights
)


class ModelWithPrefix(nn.Module):
    """A frozen model and its prefix in one module, for engines that train a model's parameters.

        prefixed = ModelWithPrefix(model, Prefix.for_model(model))
        Seq2SeqTrainer(prefixed, arguments, ...).train()        # or accelerate, DistributedDataParallel, your own loop
        prefixed.save_pretrained(folder)

    Only the prefix is trained: the model's parameters are frozen, and `train()` leaves the model in evaluation mode, so
    that its dropout stays off. `state_dict` holds the prefix alone, so that checkpoints weigh kilobytes.
    `detach_prefix(model)` gives the model back.

    A new head has to be trained too: `ModelWithPrefix(model, prefix, also_train=("classification_head",))`. Such
    modules train, checkpoint, save and load with the prefix.

    For what engines ask of a model it answers as one: `generate`, `config`, gradient checkpointing, where the weights
    lie; numbers and bytes are those of model and prefix together; files are the prefix's. Whatever else the model has,
    ask `prefixed.model`.

    FSDP2: apply `fully_shard` to this module; then every process has to call what it calls. If the model alone was
    sharded, averaging the prefix's gradients over the processes is up to you.
    """

    accepts_loss_kwargs = True  # tells transformers' Trainer that `forward` takes num_items_in_batch
    is_quantized = False  # nor does a quantised base make what is trained so: the Trainer would refuse it
    _keys_to_ignore_on_save = None  # the Trainer asks when a checkpoint lacks something

    def __init__(self, model: PreTrainedModel, prefix: Prefix | PrefixPerRow, *, also_train: Sequence[str] = ()):
        """Attach `prefix` to `model` and freeze the model, but for the modules named in `also_train`.

        Raises what `attach` raises; ValueError for a name in `also_train` that is no module with parameters.
        Warns of a head that stays frozen though it looks newly initialised, its biases all zero.
        """
        super().__init__()
        trained = _modules(model, also_train)
        prefix.attach(model)
        self.model = model.requires_grad_(False)
        self.prefix = prefix
        self.also_train = tuple(trained)
        for module in trained.values():
            module.requires_grad_(True)
        for head in _new_heads(model, self.also_train):
            warn_caller(
                f"the model's {head} looks newly initialised, since its biases are all zero, and stays frozen: "
                f"ModelWithPrefix(model, prefix, also_train=({head!r},)) trains and saves it with the prefix"
            )
        self.train(prefix.training)
        self.register_load_state_dict_post_hook(_miss_no_base)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in _ANSWERED_BY_THE_MODEL:
                return getattr(self.model, name)
            if name in ("model", "prefix"):  # not there yet
                raise
            raise AttributeError(
                f"a {type(self).__name__} has no attribute {name!r}, and does not answer for the model inside: ask "
                f".model.{name}, or .prefix.{name}",
                name=name,
                obj=self,
            ) from error

    @property
    def config(self):
        """The model's, to read and to set."""
        return self.model.config

    @config.setter
    def config(self, config) -> None:
        self.model.config = config

    @property
    def generation_config(self):
        """The model's, to read and to set: `generate` is the model's as well."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, config) -> None:
        self.model.generation_config = config

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        *,
        token_type_ids=None,
        position_ids=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        inputs_embeds=None,
        decoder_inputs_embeds=None,
        labels=None,
        num_items_in_batch: int | Tensor | None = None,
        **inputs,
    ):
        """The model's forward pass, with the prefix; what is None is not passed on.

        `num_items_in_batch` is the number of labels in all the batches whose gradients are added up (on several devices
        and over several steps): with it, the loss is divided by that number instead of the batch's own, so that the sum
        equals the loss of one large batch, whatever the lengths.
        """
        # Named one by one, because transformers' Trainer drops the columns of a data set that have no name here.
        inputs |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "encoder_outputs": encoder_outputs,
            "inputs_embeds": inputs_embeds,
            "decoder_inputs_embeds": decoder_inputs_embeds,
            "labels": labels,
        }
        output = self.model(**{name: value for name, value in inputs.items() if value is not None})
        if num_items_in_batch is not None and labels is not None:
            output.loss = output.loss * (self._predicted(labels).ne(-100).sum() / num_items_in_batch)
        return output

    def _predicted(self, labels: Tensor) -> Tensor:
        """The labels that carry loss: a decoder alone predicts each from those before it, and the first from none."""
        shifts = self.model.loss_function is ForCausalLMLoss and not self.config.is_encoder_decoder
        return labels[..., 1:] if shifts else labels

    def _get_name(self) -> str:
        """The model's name for a decoder alone: by it, the Trainer knows that label smoothing has to shift labels."""
        return type(self).__name__ if self.config.is_encoder_decoder else type(self.model).__name__

    def generate(self, *args, **kwargs):
        """The model's `generate`, with the prefix; of weights that are sharded (FSDP2), in every process."""
        gather_for(self, "_generate")
        gather_for(self.model, "generate")
        output = self._generate(*args, **kwargs)
        spread_again(self.model)
        spread_again(self)  # or an optimiser made now would get the gathered weights and train nothing
        return output

    def _generate(self, *args, **kwargs):
        return self.model.generate(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """The module that the source's tokens pass, on which the Trainer's `neftune_noise_alpha` works.

        The model's own answer is `shared`, which holds the weights and is never called.
        """
        stack = next(iter(sites_of(self.model).values())).stack
        return getattr(stack, "embed_tokens", None) or self.model.get_input_embeddings()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers model and prefix have together; `exclude_embeddings` leaves out the model's."""
        own = sum(p.numel() for p in self.prefix.parameters() if p.requires_grad or not only_trainable)
        return own + self.model.num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """How many bytes model and prefix take together."""
        own = sum(p.numel() * p.element_size() for p in self.prefix.parameters())
        return own + self.model.get_memory_footprint(return_buffers=return_buffers)

    def train(self, mode: bool = True) -> "ModelWithPrefix":
        """Put the prefix, and what is trained with it, in training mode; the model stays in evaluation mode.

        Warns of layers whose gradient checkpointing would bring their dropout with it, and stays off.
        """
        super().train(mode)
        self.model.eval()
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):  # transformers checkpoints those in training mode alone
                module.training = mode and not _drops(module)  # of the layer itself: its dropout modules stay off
        held_back = {
            type(module).__name__ for module in self.model.modules() if _checkpoints(module) and _drops(module)
        }
        if mode and held_back:
            warn_caller(
                f"gradient checkpointing is off for {', '.join(sorted(held_back))}, which in training mode would also "
                "drop activations: set the dropouts of the model's config to 0 before it is made"
            )
        for module in _modules(self.model, self.also_train).values():
            module.train(mode)
        embeddings = self.get_input_embeddings()
        embeddings.training |= mode and hasattr(embeddings, "neftune_noise_alpha")  # its hook looks for the mode
        return self

    def state_dict(self, *args, prefix: str = "", **kwargs) -> dict[str, Tensor]:
        """The tensors of the prefix, and of what is trained with it; `load_state_dict` leaves the rest alone."""
        state = self.prefix.state_dict(*args, prefix=f"{prefix}prefix.", **kwargs)
        for name, module in _modules(self.model, self.also_train).items():
            state.update(module.state_dict(*args, prefix=f"{prefix}model.{name}.", **kwargs))
        return state

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        self._base_name = prefix + "model."  # as a wrapper such as DistributedDataParallel calls it
        super()._load_from_state_dict(state_dict, prefix, *args)

    def save_pretrained(
        self,
        folder: str | os.PathLike,
        *,
        is_main_process: bool = True,
        save_function: Callable | None = None,
        state_dict: dict[str, Tensor] | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Save the prefix as `Prefix.save_pretrained` does, and the modules of `also_train` in a file of their own.

            model = accelerator.unwrap_model(prefixed)
            model.save_pretrained(
                folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
                state_dict=accelerator.get_state_dict(prefixed),
            )

        The arguments are those of `Prefix.save_pretrained`; `state_dict` has the names of this module's own.

        Raises ValueError for a PrefixPerRow, each of whose prefixes is saved by itself.
        """
        check_serialization(safe_serialization)
        state = self.state_dict() if state_dict is None else state_dict
        if is_main_process:
            check_names(state, self.state_dict(), "prefix and the modules of also_train")
        write(
            folder,
            _one_prefix(self),
            _below(state, "prefix."),
            _below(state, "model."),
            self.also_train,
            is_main_process=is_main_process,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: PreTrainedModel,
        folder: str | os.PathLike,
        *,
        prefix_class: type[Prefix] = Prefix,
        **hub,
    ) -> "ModelWithPrefix":
        """Attach what `save_pretrained` or `push_to_hub` wrote to `model`, for evaluation.

        Args:
            model: the base; modules that were trained with the prefix take over the saved numbers.
            folder: a folder, or `user/name` on the Hugging Face hub.
            prefix_class: the class that saved the prefix.
            hub: as for `Prefix.from_pretrained`.

        Raises what `Prefix.from_pretrained` and `attach` raise; ValueError if the model lacks one of the modules, or
        has it in another shape.
        """
        prefix, tensors, names = read(prefix_class, folder, **hub)
        own = _tensors(model, names)
        shapes, saved = ({name: list(t.shape) for name, t in each.items()} for each in (own, tensors))
        if shapes != saved:
            raise ValueError(f"the modules saved in {folder} do not fit the model: they are {saved}, its own {shapes}")
        prefixed = cls(model, prefix, also_train=names)
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        return prefixed

    def push_to_hub(self, repo_id: str, *, base_model: str | None = None, **options) -> str:
        """Upload what `save_pretrained` writes; everything is as for `Prefix.push_to_hub`."""
        prefix = _one_prefix(self)
        base_model = base_model or prefix.base.get("name")
        if not self.also_train:
            return prefix.push_to_hub(repo_id, base_model=base_model, **options)
        model_class, labels = type(self.model).__name__, self.model.config.num_labels
        loading = [
            "from helpers import ModelWithPrefix",
            f"from transformers import {model_class}",
            "",
            f"model = {model_class}.from_pretrained({base_model or '...'!r}, num_labels={labels})",
            f"prefixed = ModelWithPrefix.from_pretrained(model, {repo_id!r})",
        ]
        return upload(prefix, repo_id, self.save_pretrained, "\n".join(loading), base_model=base_model, **options)


T5WithPrefix = ModelWithPrefix
"""The name from when it held T5s alone."""


def _one_prefix(prefixed: ModelWithPrefix) -> Prefix:
    if not isinstance(prefixed.prefix, Prefix):
        raise ValueError(
            f"a {type(prefixed.prefix).__name__} has no files of its own: save each of its prefixes, for example "
            "[p.save_pretrained(f'prefix-{n}') for n, p in enumerate(prefixed.prefix.prefixes)]"
        )
    return prefixed.prefix


def _modules(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of these names. Raises TypeError for one text, ValueError for what is no module with parameters."""
    if isinstance(names, str):
        raise TypeError(f"also_train must be a tuple of names of modules, got one text: ({names!r},)")
    modules = dict(model.named_modules()) if names else {}
    for name in names:
        if not name or name not in modules or not any(True for _ in modules[name].parameters()):
            own = [child for child, module in model.named_children() if any(True for _ in module.parameters())]
            raise ValueError(f"a {type(model).__name__} has no module {name!r} to train: it has {', '.join(own)}")
    return {name: modules[name] for name in names}


def _drops(layer: nn.Module) -> bool:
    """Whether a layer drops activations by itself, as BART's do, and not by modules of its own."""
    return any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(layer).items())


def _checkpoints(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing


def _tensors(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of the modules of these names, as the model's own `state_dict` names them."""
    return {
        f"{name}.{key}": tensor
        for name, module in _modules(model, names).items()
        for key, tensor in module.state_dict().items()
    }


def _new_heads(model: nn.Module, trained: tuple[str, ...]) -> list[str]:
    """The model's children, but for trained ones, with a Linear whose bias is zero, as it is before training.

    T5 itself has no biases. Of a new head without, nothing can be known.
    """
    new = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None and not module.bias.is_meta
        if not f"{name}.".startswith(tuple(f"{each}." for each in trained)) and not module.bias.any()
    ]
    return list(dict.fromkeys(name.split(".")[0] for name in new))


def _below(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(name): tensor for key, tensor in state.items() if key.startswith(name)}


def _miss_no_base(module: ModelWithPrefix, keys) -> None:
    """The hook after loading a state: the frozen base is not in it, and is not missed."""
    trained = tuple(f"{module._base_name}{name}." for name in module.also_train)
    keys.missing_keys[:] = [
        key for key in keys.missing_keys if not key.startswith(module._base_name) or key.startswith(trained)
    ]
