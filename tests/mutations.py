"""Deliberate faults in `helpers`, each of which some test has to catch: `python tests/mutations.py [number ...]`.

Each fault replaces one piece of one file in a copy of the project and runs the tests that are meant to see it. A fault
that survives is printed, and makes the exit status 1. About ten minutes on one core; `test_mutations.py` holds the list
to the code in every run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    file: str  # under helpers/
    piece: str  # occurs once in it
    fault: str
    tests: str  # under tests/, separated by spaces


FAULTS = [
    # what the reshapes mean
    Fault("heads.py", '"b s (h d) -> b h s d"', '"b s (d h) -> b h s d"', "test_heads.py"),
    Fault("heads.py", '"b h s d -> b s (h d)"', '"b h s d -> b s (d h)"', "test_heads.py"),
    Fault("heads.py", "num_heads < 1 or ", "", "test_heads.py test_bad_input.py"),
    # masks
    Fault("masks.py", "tril(prefix_length + key_length - query_length)", "tril(prefix_length)", "test_masks.py"),
    Fault("masks.py", "visible[:, :prefix_length] = True", "pass", "test_masks.py"),
    Fault("masks.py", "torch.cat([prefix, visible], dim=1)", "torch.cat([visible, prefix], dim=1)", "test_masks.py"),
    Fault("masks.py", "visible.new_ones(", "visible.new_zeros(", "test_masks.py"),
    # attention
    Fault("attention.py", "query.shape[-1] ** -0.5", "query.shape[-1] ** -1", "test_attention.py"),
    Fault("attention.py", "masked_fill(~mask, -torch.inf)", "masked_fill(mask, -torch.inf)", "test_attention.py"),
    Fault("attention.py", ".masked_fill(nothing_to_see, 0.0)\n", "\n", "test_attention.py"),
    Fault("attention.py", "scores = scores + bias.to(scores.dtype)", "pass", "test_attention.py"),
    Fault("attention.py", "self.dropout if self.training else 0.0", "self.dropout", "test_attention.py"),
    Fault("attention.py", "self.v_proj(context)", "self.k_proj(context)", "test_attention.py"),
    Fault("attention.py", "self.k_proj(context)", "self.k_proj(x)", "test_attention.py"),
    Fault("attention.py", "torch.where(mask, bias, -torch.inf)", "bias", "test_attention.py"),
    Fault(
        "attention.py",
        "mask, dropout, scale=scale)\n        return",
        "mask, dropout)\n        return",
        "test_attention.py",
    ),
    Fault("attention.py", "if query.shape[:2] != key.shape[:2]:", "if False:", "test_attention.py"),
    # joining a prefix
    Fault("prefix.py", "torch.cat([prefix, content], dim=2)", "torch.cat([content, prefix], dim=2)", "test_prefix.py"),
    Fault("prefix.py", "(prefix_length, 0), value=True", "(0, prefix_length), value=True", "test_prefix.py"),
    Fault("prefix.py", "True if is_bool else 0.0", "0.0", "test_prefix.py"),
    Fault("prefix.py", "mask & allowed if is_bool", "mask if is_bool", "test_rows.py"),
    Fault("prefix.py", "torch.where(allowed, mask, -torch.inf)", "mask", "test_rows.py"),
    Fault("prefix.py", "prefix.to(content).expand", "prefix.expand", "test_t5.py"),
    Fault("prefix.py", "prefix.shape[1] == content.shape[1]", "True", "test_prefix.py test_bad_input.py"),
    # the prefix encoder
    Fault("prefix.py", '"b p (l kv h d) -> l kv b h p d"', '"b p (kv l h d) -> l kv b h p d"', "test_prefix.py"),
    Fault("prefix.py", '"b p (l kv h d) -> l kv b h p d"', '"b p (l kv d h) -> l kv b h p d"', "test_prefix.py"),
    Fault("prefix.py", "nn.Parameter(init_std * torch", "nn.Parameter(torch", "test_prefix.py"),
    Fault("prefix.py", "0.02 if init_std is None", "0.2 if init_std is None", "test_prefix.py"),
    Fault("tuning/attach.py", "init_std=init_std", "init_std=None", "test_t5.py"),
    Fault("prefix.py", "nn.Tanh()", "nn.ReLU()", "test_prefix.py"),
    Fault("prefix.py", "self.dropout(self.mlp(self.embedding))", "self.mlp(self.embedding)", "test_prefix.py"),
    Fault("prefix.py", "return folded.train(self.training)", "return folded", "test_prefix.py"),
    Fault("prefix.py", "key_values.detach().clone()", "key_values.detach()", "test_prefix.py"),
    # how the prefix reaches T5
    Fault("tuning/routing.py", "prefix.layers[layer]", "prefix.layers[0]", "test_t5.py"),
    Fault("tuning/routing.py", "prefix.layers[layer]", "prefix.layers[2 * layer % len(prefix.layers)]", "test_t5.py"),
    Fault("tuning/families.py", '"cross": "cross"}', '"cross": "self"}', "test_t5.py"),
    Fault(
        "tuning/routing.py",
        "allow_is_causal_skip=allow_is_causal_skip and is_last",
        "allow_is_causal_skip=True",
        "test_t5.py",
    ),
    Fault("tuning/routing.py", "if mask is not None and mask.shape[-1] != key.shape[2]:", "if False:", "test_t5.py"),
    Fault(
        "tuning/routing.py",
        "            check_masks(given, tokens, cache, signs.depths)\n",
        "            pass\n",
        "test_t5.py",
    ),
    Fault("tuning/refusals.py", "mask.ndim == 4 and mask.shape[-1] == keys", "mask.ndim == 4", "test_t5.py"),
    Fault("tuning/refusals.py", "== (batch, keys):", "[-1:] == (keys,):", "test_t5.py"),
    Fault(
        "tuning/refusals.py", "static and isinstance(mask, Tensor) and", "isinstance(mask, Tensor) and", "test_t5.py"
    ),
    Fault("tuning/refusals.py", " and mask.shape[1] <= keys", "", "test_t5.py"),
    Fault("tuning/refusals.py", 'given.get("encoder_attention_mask"), *states', "None, *states", "test_t5.py"),
    Fault("tuning/routing.py", "dict(zip(signs.arguments, args, strict=False))", "{}", "test_t5.py"),
    Fault("masks.py", "if at_hand and not torch", "if not torch", "test_masks.py"),
    Fault("masks.py", "type(attention_mask) is Tensor and ", "", "test_masks.py"),
    Fault("masks.py", "visible.shape[0], prefix", "len(visible), prefix", "test_masks.py"),
    Fault(
        "tuning/routing.py",
        "AttentionMaskInterface.register(_ROUTED + _name, partial(_complete_mask, _mask))",
        "pass",
        "test_t5.py",
    ),
    Fault(
        "tuning/routing.py",
        "rows.repeat_interleave(batch_size // own, dim=0)",
        "rows.repeat(batch_size // own, *[1] * (rows.ndim - 1))",
        "test_rows.py",
    ),
    Fault("tuning/routing.py", "known_cache() is cache and known_versions == versions", "True", "test_t5.py"),
    Fault(
        "tuning/routing.py",
        "known_cache() is cache and known_versions == versions",
        "known_cache() is cache",
        "test_t5.py",
    ),
    Fault("tuning/routing.py", "and int(cache.get_seq_length()) > 0", "", "test_t5.py"),
    Fault(
        "tuning/routing.py",
        "self.remembered = (weakref.ref(cache, lambda _: prefixes.clear()), versions, prefixes)",
        "pass",
        "test_t5.py",
    ),
    Fault(
        "tuning/routing.py",
        "masked_fill(~mask, torch.finfo(key.dtype).min)",
        "masked_fill(~mask, -torch.inf)",
        "test_rows.py",
    ),
    Fault("tuning/routing.py", "known_mask is mask and known_bias is bias and", "known_mask is mask and", "test_t5.py"),
    Fault("tuning/routing.py", "known_mask is mask and known_bias is bias and", "known_bias is bias and", "test_t5.py"),
    Fault("tuning/routing.py", " and prefix.joined[layer][0] is key:", ":", "test_t5.py"),
    Fault("tuning/routing.py", "prefix.joined[layer] = key, joined", "pass", "test_t5.py"),
    Fault("tuning/routing.py", "lambda _: prefixes.clear()", "lambda _: None", "test_t5.py"),
    Fault("tuning/routing.py", "    check_cache_depth(cache, signs.depths)\n", "    pass\n", "test_breadth.py"),
    Fault("tuning/routing.py", "stack._forward_pre_hooks_with_kwargs.pop(key)", "pass", "test_t5.py"),
    Fault(
        "tuning/routing.py",
        "stack.set_attn_implementation(stack.config._attn_implementation.removeprefix(_ROUTED))",
        "pass",
        "test_t5.py",
    ),
    Fault("tuning/families.py", "if name in found:", "if False:", "test_t5.py"),
    # where other models than T5 have their attention
    Fault(
        "tuning/families.py", "attention.prefix_place = name, layer", "attention.prefix_place = name, 0", "test_t5.py"
    ),
    Fault("tuning/families.py", "if len(shapes) > 1:", "if False:", "test_families.py"),
    Fault("tuning/families.py", "for cls in type(module).__mro__", "for cls in [type(module)]", "test_families.py"),
    Fault(
        "tuning/families.py",
        'stack.config.is_decoder if line["side"] == "config" else line["side"] == "decoder"',
        'line["side"] != "encoder"',
        "test_families.py",
    ),
    Fault("tuning/routing.py", "            take_signs(site)\n", "", "test_families.py"),
    Fault("tuning/routing.py", "        _check_configs(sites[name])\n", "        pass\n", "test_families.py"),
    Fault("tuning/routing.py", 'if implementation == "eager" and getattr', "if False and getattr", "test_families.py"),
    Fault(
        "tuning/routing.py",
        "    except AttributeError:\n        raise",
        "    except KeyError:\n        raise",
        "test_families.py",
    ),
    Fault(
        "tuning/routing.py",
        'getattr(sys.modules[cls.__module__], "eager_attention_forward", None)',
        '__import__("transformers").models.t5.modeling_t5.eager_attention_forward',
        "test_families.py",
    ),
    Fault("tuning/refusals.py", " or isinstance(mask, dict)", "", "test_families.py"),
    Fault(
        "tuning/refusals.py",
        "keys += cache.get_seq_length()",
        "keys = cache.get_mask_sizes(keys, 0)[0]",
        "test_families.py",
    ),
    Fault("tuning/refusals.py", "for layer in range(len(own.layers)))", "for layer in [0])", "test_families.py"),
    Fault("tuning/engines.py", "labels[..., 1:] if shifts else labels", "labels", "test_families.py"),
    Fault("tuning/engines.py", "mode and not _drops(module)", "mode", "test_families.py"),
    Fault("tuning/engines.py", "if mode and held_back:", "if False:", "test_families.py"),
    Fault("tuning/engines.py", "can_generate loss_type", "can_generate", "test_families.py"),
    Fault("tuning/attach.py", "tuple(own) if sites is None", "SITES if sites is None", "test_families.py"),
    Fault("tuning/maps.py", '(has_cache and "encoder" not in prefix.sites)', "False", "test_families.py"),
    # T5Prefix and its relatives
    Fault(
        "tuning/families.py",
        "return len(self.attentions), self.heads, self.head_dim",
        "return len(self.attentions), self.heads, self.stack.config.hidden_size // self.heads",
        "test_t5.py",
    ),
    Fault("tuning/routing.py", "if hand_over.current() is not None or (", "if (", "test_t5.py"),
    Fault("tuning/routing.py", " or (alone and hand_over.entered):", ":", "test_threads.py"),
    Fault(
        "tuning/routing.py",
        "            if self._attachment is self._hand_over.everywhere:",
        "            if True:",
        "test_t5.py",
    ),
    Fault("tuning/routing.py", "                    detach_prefix(model)", "                    pass", "test_t5.py"),
    Fault("tuning/routing.py", "        self()\n", "        pass\n", "test_t5.py"),
    Fault("tuning/routing.py", "if self._attachment is not self._hand_over.everywhere:", "if False:", "test_t5.py"),
    # threads and tasks
    Fault("tuning/routing.py", "else _CONTEXT.get()", "else _THREAD.entered", "test_threads.py"),
    Fault("tuning/routing.py", "else _CONTEXT.get()", "else self.entered[-1:]", "test_threads.py"),
    Fault("tuning/routing.py", " if attachment in self.entered]", "]", "test_threads.py"),
    Fault(
        "tuning/routing.py", "args: tuple, kwargs: dict | None = None)", "args: tuple, kwargs: dict)", "test_threads.py"
    ),
    Fault(
        "tuning/routing.py", "                if not hand_over.entered:", "                if True:", "test_threads.py"
    ),
    Fault(
        "tuning/routing.py",
        "_ATTACHING = threading.RLock()",
        "_ATTACHING = __import__('contextlib').nullcontext()",
        "test_threads.py",
    ),
    Fault("tuning/routing.py", "class _Thread(threading.local):", "class _Thread:", "test_threads.py"),
    Fault(
        "tuning/routing.py",
        "if self.entered and not torch.compiler",
        "if False and not torch.compiler",
        "test_threads.py",
    ),
    Fault("tuning/routing.py", "hand_over.everywhere, hand_over.entered = None, ()", "pass", "test_threads.py"),
    Fault(
        "tuning/routing.py",
        "        return mine[0] if mine else None",
        "        return mine[0] if mine else self.entered[0]",
        "test_threads.py",
    ),
    # attention maps, exports
    Fault("tuning/maps.py", "kept = given[..., slots:]", "kept = given[..., :-slots or None]", "test_maps.py"),
    Fault("tuning/maps.py", 'if site != "cross" else 1', 'if site != "cross" else 999', "test_maps.py"),
    Fault("tuning/maps.py", "if given.shape[-1] < slots + own:", "if False:", "test_maps.py"),
    Fault("tuning/maps.py", '"decoder" if of_decoder else "encoder"', '"encoder"', "test_maps.py"),
    Fault("tuning/routing.py", "            check_assistant()\n", "            pass\n", "test_maps.py"),
    Fault("tuning/refusals.py", ' and frame.f_code.co_name != "generate"', "", "test_maps.py"),
    Fault("tuning/maps.py", " if renormalise else kept", "", "test_maps.py"),
    Fault("prefix.py", "    if is_exporting():  #", "    if False:  #", "test_t5.py"),
    Fault("tuning/routing.py", "if is_exporting() and torch", "if torch", "test_t5.py"),
    Fault(
        "tuning/routing.py",
        "            return None  # the stack says what is missing",
        "            pass",
        "test_t5.py",
    ),
    Fault("tuning/attach.py", "self.eval()  # without dropout", "pass", "test_t5.py"),
    Fault("tuning/attach.py", "self.train(training)\n", "pass\n", "test_t5.py"),
    Fault(
        "tuning/attach.py",
        "F.pad(k, (0, 0, 0, longest - k.shape[4]))",
        "F.pad(k, (0, 0, longest - k.shape[4], 0))",
        "test_rows.py",
    ),
    Fault(
        "tuning/attach.py",
        "padded[index] for index in self.rows], dim=2)",
        "padded[index] for index in self.rows[::-1]], dim=2)",
        "test_rows.py",
    ),
    Fault(
        "tuning/attach.py",
        "torch.arange(max(lengths), device=device) <",
        "torch.arange(max(lengths), device=device) <=",
        "test_rows.py",
    ),
    # saving and loading
    Fault(
        "tuning/store.py",
        "        replace_file(folder / CONFIG_NAME, (json",
        "        (folder / CONFIG_NAME).write_bytes((json",
        "test_saving.py",
    ),
    Fault(
        "tuning/store.py",
        "os.replace(unfinished, path)",
        "path.write_bytes(unfinished.read_bytes()[:-9]); os.replace(unfinished, path)",
        "test_saving.py",
    ),
    Fault(
        "tuning/store.py",
        "tensor.clone() for name, tensor in load",
        "tensor for name, tensor in load",
        "test_saving.py",
    ),
    Fault("tuning/store.py", "return prefix.eval(), modules", "return prefix, modules", "test_t5.py"),
    Fault("tuning/store.py", "rtol=2**-8", "rtol=1", "test_t5.py"),
    Fault("tuning/store.py", " and not tensor.is_meta", "", "test_t5.py test_breadth.py"),
    Fault("tuning/store.py", "class_of(first) in (nn.Linear, Conv1D) and ", "", "test_breadth.py"),
    Fault("tuning/store.py", "READINGS = 20", "READINGS = 1", "test_saving.py"),
    Fault("tuning/store.py", "fcntl.flock(handle, fcntl.LOCK_EX)", "pass", "test_saving.py"),
    Fault("tuning/store.py", "fcntl.flock(handle, fcntl.LOCK_UN)  #", "pass  #", "test_saving.py"),
    Fault("tuning/store.py", "            os.close(handle)", "            pass", "test_saving.py"),
    Fault("tuning/store.py", "removable = alone or is_old", "removable = True", "test_saving.py"),
    Fault("tuning/store.py", "removable = alone or is_old", "removable = alone", "test_saving.py"),
    Fault("tuning/store.py", "removable = alone or is_old", "removable = is_old", "test_saving.py"),
    Fault("tuning/store.py", "is_old and _UNFINISHED.fullmatch", "_UNFINISHED.fullmatch", "test_saving.py"),
    Fault("tuning/store.py", "    if not alone:  # another", "    if False:  # another", "test_saving.py"),
    Fault("tuning/store.py", "    if not is_main_process:  # but", "    if False:  # but", "test_saving.py"),
    Fault("tuning/store.py", "if given.keys() != own.keys():", "if False:", "test_saving.py"),
    Fault("tuning/store.py", "FORMAT_VERSION if modules else 1", "1", "test_also_train.py"),
    Fault("tuning/store.py", ".detach().clone().contiguous()", ".detach().contiguous()", "test_also_train.py"),
    Fault("tuning/store.py", '    if "modules" in config:', "    if False:", "test_also_train.py"),
    Fault("tuning/store.py", " and not os.path.exists(name)", "", "test_saving.py"),
    Fault("tuning/store.py", "name and is_repo_id(name)", "name", "test_saving.py"),
    Fault(
        "tuning/store.py",
        "        if modules:\n            warn",
        "        if False:\n            warn",
        "test_also_train.py",
    ),
    Fault("_checks.py", "depth, frame = depth + 1, frame.f_back", "break", "test_saving.py"),
    # the hub
    Fault("tuning/hub.py", "if not api.file_exists", "if True or api.file_exists", "test_hub.py"),
    Fault("tuning/hub.py", "delete_patterns=list(PATTERNS)", "delete_patterns=[]", "test_hub.py"),
    Fault("tuning/hub.py", "allow_patterns=list(PATTERNS)", "allow_patterns=['*']", "test_hub.py"),
    Fault("tuning/hub.py", 'name.count("/") == 1', "True", "test_hub.py"),
    Fault("tuning/hub.py", "if path.is_dir() or not", "if not", "test_hub.py"),
    Fault(
        "tuning/hub.py",
        "next(filter(None, map(str.strip, str(error).splitlines())), ",
        "str(error) or (",
        "test_hub.py",
    ),
    Fault("tuning/hub.py", "if any(map(is_sharded, prefix.parameters())):", "if False:", "test_fsdp.py"),
    # one module for engines
    Fault("tuning/engines.py", "if name in _ANSWERED_BY_THE_MODEL:", "if name != 'model':", "test_answers.py"),
    Fault(
        "tuning/engines.py",
        "return own + self.model.num_parameters(",
        "return self.model.num_parameters(",
        "test_answers.py",
    ),
    Fault("tuning/engines.py", "p.requires_grad or not only_trainable", "True", "test_answers.py"),
    Fault("tuning/engines.py", "return own + self.model.get_memory", "return self.model.get_memory", "test_answers.py"),
    Fault("tuning/engines.py", "self.model.config = config", "vars(self)['config'] = config", "test_answers.py"),
    Fault("tuning/engines.py", "            module.requires_grad_(True)", "            pass", "test_also_train.py"),
    Fault("tuning/engines.py", "            module.train(mode)", "            pass", "test_also_train.py"),
    Fault("tuning/engines.py", "            state.update(module", "            (module", "test_also_train.py"),
    Fault("tuning/engines.py", " or key.startswith(trained)", "", "test_also_train.py"),
    Fault("tuning/engines.py", "                own[name].copy_(tensor)", "                pass", "test_also_train.py"),
    Fault("tuning/engines.py", "        if shapes != saved:", "        if False:", "test_also_train.py"),
    Fault("tuning/engines.py", " and not module.bias.any()", "", "test_also_train.py"),
    Fault("tuning/engines.py", "embeddings.training |= mode and", "embeddings.training |=", "test_also_train.py"),
    Fault("tuning/engines.py", "embeddings.training |= mode and", "_ =", "test_also_train.py"),
    Fault("tuning/engines.py", "        if not self.also_train:", "        if True:", "test_hub.py"),
    # sharded
    Fault(
        "tuning/sharded.py",
        "return tensor.full_tensor() if is_sharded(tensor) else tensor",
        "return tensor",
        "test_fsdp.py",
    ),
    Fault("tuning/sharded.py", "        register_fsdp_forward_method(module, name)", "        pass", "test_fsdp.py"),
    Fault("tuning/sharded.py", "        module.reshard()", "        pass", "test_fsdp.py"),
    Fault("tuning/sharded.py", "classes[classes.index(FSDPModule) + 1] if", "classes[0] if", "test_fsdp.py"),
    Fault("tuning/attach.py", "if is_sharded(self.encoders[site].embedding):", "if False:", "test_fsdp.py"),
    # training and scoring
    Fault("tuning/training.py", "masked_fill(labels.attention_mask == 0, -100)", "clone()", "test_training.py"),
    Fault("tuning/training.py", "optimizer.zero_grad()", "pass", "test_training.py"),
    Fault("tuning/training.py", "schedule.step()", "pass", "test_training.py"),
    Fault("tuning/training.py", "nn.utils.clip_grad_norm_(parameters, clip)", "pass", "test_training.py"),
    Fault("tuning/training.py", "weight_decay=0.0", "weight_decay=0.5", "test_training.py"),
    Fault("tuning/training.py", "signal.signal(signal.SIGINT, before)", "pass", "test_training.py"),
    Fault("tuning/training.py", "interrupts.append(number)", "pass", "test_training.py"),
    Fault("tuning/training.py", "p.strip() == t.strip()", "p == t", "test_training.py"),
    Fault("tuning/training.py", "/ len(targets)", "/ len(set(targets))", "test_training.py"),
    Fault("tuning/training.py", "most_common(1)[0][0]", "most_common()[-1][0]", "test_training.py"),
    Fault(
        "tuning/training.py",
        "finally:\n        torch.set_num_threads(before)",
        "finally:\n        pass",
        "test_training.py",
    ),
    Fault("tuning/training.py", "not small or ", "", "test_training.py"),
    Fault("tuning/training.py", "before == 1 or ", "", "test_training.py"),
    Fault(
        "tuning/training.py",
        ' or any(parameter.device.type != "cpu" for parameter in parameters)',
        "",
        "test_training.py",
    ),
    Fault("tuning/training.py", "args=(before,)", "args=(1,)", "test_training.py"),
    Fault(
        "tuning/training.py",
        "with one_thread_if_small(model):\n        for start",
        "with nullcontext():\n        for start",
        "test_training.py",
    ),
    # the command
    Fault("train.py", "count_in_steps(args, trainer.state)\n", "pass\n", "test_train.py"),
    Fault("train.py", "        sys.exit(130)", "        sys.exit(1)", "test_train.py"),
    Fault("train.py", "os._exit(130)", "pass", "test_train.py"),
    Fault("train.py", "    trainer.state = TrainerState", "    state = TrainerState", "test_train.py"),
    Fault("tuning/progress.py", "self.evaluations += 1", "pass", "test_train.py"),
    Fault("tuning/progress.py", "self.began - self.evaluating", "self.began", "test_train.py"),
    Fault("tuning/progress.py", " + control.should_evaluate if", " if", "test_train.py"),
    Fault("tuning/progress.py", 'set_description("evaluating")', "refresh()", "test_train.py"),
    Fault("train.py", "    if path.exists():", "    if False:", "test_train.py"),
    Fault("train.py", 'ours.train_file == DEMO["train_file"]', "True", "test_train.py"),
    Fault("train.py", '"backslashreplace"', '"replace"', "test_train.py"),
    Fault("train.py", "max_new_tokens={ours.max_target_length}", "max_new_tokens=1", "test_train.py"),
    Fault("bases/load.py", ") from None", ") from error", "test_base.py"),
    # the loss for less work
    Fault("tuning/losses.py", "labels[labelled])", "labels.flatten()[: labelled.sum()])", "test_training.py"),
    Fault("tuning/losses.py", ".sub_(highest)", "", "test_lean_t5.py"),
    Fault("tuning/losses.py", ".scatter_add_(1, right[:, None], -torch.ones_like(total))", "", "test_lean_t5.py"),
    Fault(
        "tuning/losses.py",
        "gradients.append(shares.to(",
        "ctx.kept = [*getattr(ctx, 'kept', []), shares]\n                gradients.append(shares.to(",
        "test_lean_t5.py",
    ),
    Fault("tuning/losses.py", " / len(labels)", "", "test_lean_t5.py"),
    Fault("tuning/losses.py", "gradient * outer", "gradient + 0 * outer", "test_lean_t5.py"),
    Fault("tuning/losses.py", "LOGIT_BYTES // (4 * len(head))", "len(labels)", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "labelled.flip(1).cumsum(dim=1).flip(1) > 0", "labelled", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "labelled.flip(1).cumsum(dim=1).flip(1) > 0", "labels == labels", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "if real.all() else", "if True else", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "scale=1.0", "scale=None", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", " * norm.weight", "", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "self.lm_head *= ", "self.lm_head * ", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "self.activation(gate) * inner", "self.activation(inner) * gate", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "self.prefix.visible(site)", "None", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "row_for_each_example(part, len(tokens))", "part", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "isinstance(model, T5ForConditionalGeneration) and ", "", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "len(encoded) != source.sum()", "False", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", " or module.bias is not None", "", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "prefix.check_fits(model)", "pass", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "len(dtypes) > 1 or ", "", "test_lean_t5.py"),
    Fault("tuning/routing.py", "isinstance(part, nn.Dropout) or ", "", "test_lean_t5.py test_training.py"),
    Fault("prefix.py", "F.pad(mask.contiguous(), ", "F.pad(mask, ", "test_lean_t5.py"),
    Fault(
        "tuning/training.py",
        "states[attention_mask.bool()] = rows",
        "states[attention_mask.sort(descending=True).values.bool()] = rows",
        "test_lean_t5.py",
    ),
    Fault("tuning/training.py", "lean_model(batch, encoded=rows)", "lean_model(batch)", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "(attention.k, attention.v)", "(attention.v, attention.k)", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "compute_bias(length, length)", "compute_bias(length, length) * 0", "test_lean_t5.py"),
    Fault("tuning/lean_t5.py", "eps=self.eps", "eps=0.1", "test_lean_t5.py"),
    Fault("tuning/training.py", "if lean_model else model.encoder", "if False else model.encoder", "test_lean_t5.py"),
    # what a step costs
    Fault("tuning/routing.py", "prefix.added = (*prefix.added, (*given, added))[-2:]", "pass", "test_costs.py"),
    Fault(
        "prefix.py",
        "prefix.to(content).expand(content.shape[0], -1, -1, -1)",
        "prefix.to(content).repeat(len(content) // len(prefix), 1, 1, 1) * 1",
        "test_costs.py",
    ),
    Fault("tuning/losses.py", "args[0][labelled],)", "args[0] * 1,)", "test_costs.py"),
    Fault("tuning/lean_t5.py", "        if encoded is None:", "        if True:", "test_costs.py"),
    Fault(
        "tuning/lean_t5.py",
        'states = encoder.embed_tokens(batch["input_ids"][tokens])',
        'states = encoder.embed_tokens(batch["input_ids"][tokens]).requires_grad_(True)',
        "test_costs.py",
    ),
    # a decoder alone learns to write behind a source
    Fault(
        "tuning/continuing.py",
        "labels[row, len(given) : end] = torch.tensor(target)",
        "labels[row, :end] = input_ids[row, :end]",
        "test_continuing.py",
    ),
    Fault("tuning/continuing.py", ">= longest - lengths", "< lengths", "test_continuing.py"),
    Fault("tuning/continuing.py", "[tokenizer.eos_token_id, *own]", "own", "test_continuing.py"),
    Fault("tuning/continuing.py", 'batch["attention_mask"].bool() & (', "(", "test_continuing.py"),
    Fault("tuning/continuing.py", "each[-max_source_length:]", "each[:max_source_length]", "test_continuing.py"),
    Fault(
        "tuning/continuing.py",
        "[*each[: max_target_length - 1], each[-1]]",
        "each[:max_target_length]",
        "test_continuing.py",
    ),
    Fault(
        "tuning/continuing.py",
        '.input_ids[-1] == end else "\\n"',
        '.input_ids[-1] == end else ""',
        "test_continuing.py",
    ),
    Fault("tuning/continuing.py", "add_generation_prompt=True", "add_generation_prompt=False", "test_continuing.py"),
    Fault("tuning/continuation_trainer.py", '[:, sources["input_ids"].shape[1] :]', "", "test_continuing.py"),
    Fault("tuning/training.py", "output[:, begin:]", "output", "test_continuing.py"),
    Fault(
        "tuning/engines.py",
        "type(self).__name__ if self.config.is_encoder_decoder else",
        "type(self).__name__ if True else",
        "test_continuing.py",
    ),
    Fault("train.py", 'if "decoder" not in sites_of(model):', "if False:", "test_continuing.py"),
    Fault("train.py", "for name, value in _form(ours).items() if value", "for name, value in ()", "test_continuing.py"),
    Fault("tuning/resuming.py", 'own["chat"] or None', "None", "test_continuing.py"),
    Fault("bases/load.py", "if config.is_encoder_decoder else", "if True else", "test_continuing.py"),
    Fault("tuning/losses.py", "F.pad(labels[:, 1:], (0, 1), value=-100)", "labels * 1", "test_continuing.py"),
    Fault("tuning/losses.py", "args[0][labelled],)", "args[0][labels > 4],)", "test_continuing.py"),
    # one query behind all keys has no mask
    Fault(
        "tuning/routing.py",
        "allow_is_causal_skip=allow_is_causal_skip and is_last",
        "allow_is_causal_skip=True",
        "test_families.py",
    ),
    Fault("tuning/routing.py", "and keys == key.shape[2]:", "and True:", "test_families.py"),
    Fault("tuning/routing.py", "and query.shape[2] > 1\n", "and False\n", "test_t5.py"),
    Fault(
        "tuning/routing.py",
        "added = bias if added is None else added + bias",
        "added = added + bias",
        "test_peft_causal.py",
    ),
    # the small GPT's pretraining goes on where it stopped
    Fault("bases/build/pretraining.py", "islice(batches, done, None)", "batches", "test_gpt_base.py"),
    Fault("bases/build/pretraining.py", "in held.items():", 'in [("model", held["model"])]:', "test_gpt_base.py"),
    # exchanged with peft
    Fault("tuning/peft_prefix.py", "[2 * layer % pairs if", "[layer % pairs if", "test_peft_prefix.py"),
    Fault(
        "tuning/peft_prefix.py",
        "by_pair[_pairs_of_layers(prefix_class, layers, pairs)]",
        "by_pair[:layers]",
        "test_peft_prefix.py",
    ),
    Fault("tuning/peft_prefix.py", "layers + 1 - layers % 2", "layers + 1", "test_peft_prefix.py"),
    Fault("tuning/peft_prefix.py", "new_zeros(pairs,", "new_ones(pairs,", "test_peft_prefix.py"),
    Fault(
        "tuning/peft_prefix.py",
        '"p (n kv h d) -> n kv 1 h p d"',
        '"p (n kv d h) -> n kv 1 h p d"',
        "test_peft_prefix.py",
    ),
    Fault("tuning/peft_prefix.py", "past_seen_tokens=slots + past", "past_seen_tokens=past", "test_peft_prefix.py"),
    Fault("tuning/peft_prefix.py", "past_seen_tokens=slots + past", "past_seen_tokens=slots", "test_peft_prefix.py"),
    Fault("tuning/peft_prefix.py", "slots, device=device,", "slots,", "test_peft_prefix.py"),
    Fault(
        "tuning/peft_prefix.py", "return PeftT5Prefix(dict(super", "return T5Prefix(dict(super", "test_peft_prefix.py"
    ),
    Fault("tuning/peft_prefix.py", "prefix.fold().eval()", "prefix.fold()", "test_peft_prefix.py"),
    Fault("tuning/peft_prefix.py", ".to(device).eval()", ".to(device)", "test_peft_prefix.py"),
    Fault("tuning/peft_prefix.py", "else rows.float()", "else rows", "test_peft_prefix.py"),
    Fault("tuning/peft_prefix.py", "if pairs < layers or (", "if (", "test_peft_prefix.py"),
    Fault("tuning/peft_prefix.py", " or (prefix_class is PeftPrefix and pairs != layers)", "", "test_peft_causal.py"),
    Fault(
        "tuning/peft_prefix.py",
        '"""The number of slots."""\n        return self.encoders["decoder"].prefix_length',
        '"""The number of slots."""\n        return 0',
        "test_peft_causal.py",
    ),
    Fault("tuning/peft_prefix.py", ">= window", "> window", "test_peft_causal.py"),
    Fault("tuning/peft_prefix.py", "+ past + slots", "+ past", "test_peft_causal.py"),
    Fault("tuning/peft_prefix.py", 'if kind == "sliding_attention" else', "if True else", "test_peft_causal.py"),
    Fault(
        "tuning/peft_prefix.py",
        "return PeftPrefix(dict(super().fold().encoders), self.base)",
        "return Prefix(dict(super().fold().encoders), self.base)",
        "test_peft_causal.py",
    ),
    Fault("tuning/attach.py", "[[0 if index is None else own[index]]", "[[own[0]]", "test_peft_causal.py"),
    Fault(
        "tuning/peft_prefix.py",
        "(heads, width) != (model_heads, ",
        "(model_heads, width) != (model_heads, ",
        "test_peft_prefix.py",
    ),
    Fault("tuning/peft_prefix.py", '!= {"prompt_embeddings"}', '< {"prompt_embeddings"}', "test_peft_prefix.py"),
    Fault("tuning/peft_prefix.py", "not in (None, submodules)", "not in (None, 1, 2)", "test_peft_prefix.py"),
    Fault(
        "tuning/peft_prefix.py", "not path.is_file() and (folder / PICKLE", "(folder / PICKLE", "test_peft_prefix.py"
    ),
    Fault("tuning/routing.py", "else cache.get_seq_length()", "else 0", "test_peft_prefix.py"),
    Fault("tuning/routing.py", "prefix_bias[layer]", "prefix_bias[0]", "test_peft_prefix.py"),
    Fault("tuning/routing.py", 'if site == "decoder" and prefix', "if prefix", "test_peft_prefix.py"),
    Fault(
        "tuning/routing.py",
        "row_for_each_example(prefix_bias[layer], key.shape[0])",
        "prefix_bias[layer].repeat(len(key) // prefix_bias.shape[1], 1, 1, 1)",
        "test_peft_prefix.py",
    ),
    Fault("tuning/attach.py", "(0, longest - bias.shape[-1])", "(longest - bias.shape[-1], 0)", "test_peft_prefix.py"),
    # bfloat16 where the processor has no instructions for it
    Fault("tuning/training.py", "    _warn_of_slow_bfloat16(model)\n", "", "test_training.py"),
    Fault("tuning/training.py", "if torch.bfloat16 in on_cpu and not", "if not", "test_training.py"),
    Fault(
        "tuning/training.py",
        "if torch.bfloat16 in on_cpu and not",
        "if torch.bfloat16 in on_cpu and",
        "test_training.py",
    ),
    Fault("tuning/training.py", "torch.cpu._is_avx512_bf16_supported() or ", "", "test_training.py"),
    Fault(
        "tuning/training.py", 'if platform.machine().lower() in ("x86_64", "amd64"):', "if False:", "test_training.py"
    ),
    # figures in a plain script
    Fault("course/figures/canvas.py", 'hasattr(ipython.get_ipython(), "kernel")', "True", "test_plain_script.py"),
    Fault("course/figures/canvas.py", "ipython is not None and hasattr", "hasattr", "test_plain_script.py"),
    # figures
    Fault("course/figures/canvas.py", 'BACKGROUND = "#E2DED5"', 'BACKGROUND = "#FFFFFF"', "test_figures.py"),
    Fault("course/figures/canvas.py", 'PREFIX_INK = "#9A4100"', "PREFIX_INK = PREFIX_COLOUR", "test_figures.py"),
    Fault(
        "course/figures/matrices.py",
        "_colour_limits(values, largest), numbers)\n            axes",
        "_colour_limits(matrix, largest), numbers)\n            axes",
        "test_figures.py",
    ),
    Fault("course/figures/matrix_words.py", "< 1e-6 else 2", "< 0.01 else 2", "test_figures.py"),
    Fault(
        "course/figures/layer.py",
        '("query", q), ("key", k), ("value", v)',
        '("query", q), ("key", v), ("value", k)',
        "test_figures.py",
    ),
    Fault("course/figures/layer.py", '"white", "bold"', '"white", "normal"', "test_figures.py"),
    Fault(
        "course/figures/layer.py",
        "return BACKGROUND, PALE_LINE, 1.0, PALE_INK",
        "return PAPER, LINE, 1.0, INK",
        "test_figures.py",
    ),
    Fault(
        "course/figures/layer.py",
        '"query × keyᵀ", "scale": "÷ √head_dim"',
        '"query × keyᵀ", "scale": "× √head_dim"',
        "test_figures.py",
    ),
    Fault(
        "course/figures/layer.py",
        "listed([names[part] for part in lit])",
        "listed([names[part] for part in drawn])",
        "test_figures.py",
    ),
    Fault("course/figures/path.py", "** 0.5 if scaled", "if scaled", "test_figures.py"),
    Fault("course/figures/path.py", "_bars(panels[1], weights,", "_bars(panels[1], scores,", "test_figures.py"),
    Fault("course/figures/cells.py", "return cell // features", "return cell % features", "test_figures.py"),
    Fault(
        "course/figures/cells.py",
        "colours[number])\n                if",
        "colours[column])\n                if",
        "test_figures.py",
    ),
    # tensors on the model's device
    Fault("masks.py", "dtype=torch.bool, device=device", "dtype=torch.bool", "second_device_checks.py"),
    Fault(
        "tuning/attach.py",
        "torch.arange(max(lengths), device=device)",
        "torch.arange(max(lengths))",
        "second_device_checks.py",
    ),
    Fault("tuning/attach.py", ".to(_device(model), torch.float32)", ".to(torch.float32)", "second_device_checks.py"),
    Fault("tuning/training.py", '"labels": labels.to(device)', '"labels": labels', "second_device_checks.py"),
    # how scores are chosen
    Fault(
        "bases/scores.py",
        'return mean(row["validation_exact"]',
        'return mean(row["test_exact"]',
        "test_measure.py",
    ),
    Fault("bases/scores.py", ', -mean(row["validation_loss"]', ', mean(row["validation_loss"]', "test_measure.py"),
    Fault("bases/scores.py", "len(set(each)) < len(each)", "False", "test_measure.py"),
    Fault("bases/scores.py", "len(set(map(frozenset, seeds.values()))) > 1", "False", "test_measure.py"),
    Fault("bases/build/plans.py", "if run_of(row) in wanted]", "]", "test_measure.py"),
    Fault("bases/build/plans.py", "if run not in map(run_of, rows)", "if True", "test_measure.py"),
]


def survives(fault: Fault, project: Path) -> bool:
    """Whether all the tests of `fault` pass in a copy of the project that has it."""
    path = project / "helpers" / fault.file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(fault.piece, fault.fault), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        result = subprocess.run(
            [*command, *(f"tests/{name}" for name in fault.tests.split())],
            cwd=project,
            env={**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(original, encoding="utf-8")
    if result.returncode not in (0, 1):  # 1: some test failed; anything else is no verdict
        raise RuntimeError(f"the tests did not run:\n{result.stdout}{result.stderr}")
    return result.returncode == 0


def main(numbers: list[int]) -> int:
    chosen = [(number, FAULTS[number]) for number in numbers or range(len(FAULTS))]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "notebooks")
        shutil.copytree(ROOT, project, ignore=ignored)
        (project / "notebooks").mkdir()
        shutil.copy(ROOT / "notebooks" / "conftest.py", project / "notebooks")  # how figures are compared
        for number, fault in chosen:
            survived = survives(fault, project)
            survivors += survived
            verdict = "SURVIVED" if survived else "caught"
            print(f"{number:2} {verdict}: {fault.file}: {fault.piece.strip()!r} -> {fault.fault.strip()!r}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
