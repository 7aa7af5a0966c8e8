"""A prefix on disk: its files are written and read here, and its base is known again."""

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from helpers._checks import warn_caller
from helpers.prefix import PrefixEncoder
from helpers.tuning.families import Site
from helpers.tuning.hub import is_repo_id, lines_that_load, local_folder, upload
from helpers.tuning.sharded import class_of, is_sharded, whole

try:
    import fcntl
except ImportError:  # Windows has no locks for folders
    fcntl = None

FORMAT_VERSION = 2  # 1: the prefix alone, written as 1 still; 2: modules trained with it
CONFIG_NAME = "prefix_config.json"
_LEFTOVER = re.compile(r"(prefix|modules)-[0-9a-f]{16}\.safetensors")
_UNFINISHED = re.compile(r"\.unfinished-[0-9a-f]{32}")
SECONDS_TO_FINISH = 3600  # no save takes as long: files that are older belong to none in progress
READINGS = 20


class Stored:
    """What a prefix with `encoders` and `base` does with folders and with the Hugging Face hub."""

    def save_pretrained(
        self,
        folder: str | os.PathLike,
        *,
        is_main_process: bool = True,
        save_function: Callable | None = None,
        state_dict: dict[str, Tensor] | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write the prefix, its MLP included, to `folder` as safetensors and json.

        At every moment the folder holds a whole prefix, whoever is interrupted and however many processes save there:
        the weights lie in a file named after their content, and the json, which names that file, is replaced after it.
        Weights that no json names any more are removed by whoever has the folder's lock. Where folders have no locks
        (Windows, most network file systems), those younger than an hour stay, since another process may be about to
        name them. Nothing else in `folder` is touched.

        A prefix that is sharded (FSDP2's `fully_shard`) is gathered first: every process has to call this.

        Args:
            folder: made if need be.
            is_main_process: False writes nothing.
            save_function: taken, as transformers takes it, because accelerate's documentation passes
                `accelerator.save`; how the files are written does not depend on it.
            state_dict: tensors to write instead of the prefix's own, by the same names.
            safe_serialization: True; there is no other way.

        Raises ValueError, and writes nothing, if `folder` holds a saved prefix that this version cannot read, if
        `state_dict` has other names than the prefix, or if `safe_serialization` is False.
        """
        check_serialization(safe_serialization)
        write(folder, self, state_dict, is_main_process=is_main_process)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> "Stored":
        """Read what `save_pretrained` or `push_to_hub` wrote: the same numbers, bit for bit, on the CPU.

        The prefix is in evaluation mode.

        Args:
            folder: a folder, or `user/name` on the Hugging Face hub.
            revision: branch, tag or commit. This and the following are for the hub alone.
            token, cache_dir, force_download, local_files_only: as transformers' `from_pretrained` has them.

        Raises FileNotFoundError if there is no saved prefix in `folder`, ValueError if its files cannot be read or do
        not belong together, OSError if the hub has no such repository or cannot be reached.
        Warns if modules of the model were trained with the prefix: `ModelWithPrefix.from_pretrained` loads both.
        """
        hub = {"revision": revision, "token": token, "cache_dir": cache_dir}
        hub |= {"force_download": force_download, "local_files_only": local_files_only}
        prefix, modules, names = read(cls, folder, **hub)
        if modules:
            warn_caller(
                f"{', '.join(names)} of the model was trained with the prefix in {folder} and is not loaded: "
                "ModelWithPrefix.from_pretrained(model, folder) loads both"
            )
        return prefix

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload prefix",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        tags: Sequence[str] = (),
        base_model: str | None = None,
    ) -> str:
        """Upload the prefix's files to the Hugging Face hub, in one commit, and return the commit's address.

        `from_pretrained(repo_id)` reads them again. The repository gets a model card, README.md, if it has none.

        Args:
            repo_id: `user/name`; made if need be.
            private: whether a new repository is private.
            token: None for the one of `hf auth login`.
            revision: the branch to upload to, None for main; made if need be.
            create_pr: propose the upload instead of making it.
            tags: of the card, besides "prefix-tuning" and "t5".
            base_model: the base's name on the hub, for the card; None for the name that `for_model` saw.

        Raises ValueError for a sharded prefix; OSError if the hub refuses or cannot be reached.
        """
        base_model = base_model or self.base.get("name")
        return upload(
            self,
            repo_id,
            self.save_pretrained,
            lines_that_load(class_of(self), base_model, repo_id),
            base_model=base_model,
            tags=tags,
            commit_message=commit_message,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )


# --- writing ---------------------------------------------------------------------------------------------------------


def write(
    folder: str | os.PathLike,
    prefix: Stored,
    state: dict[str, Tensor] | None = None,
    modules: dict[str, Tensor] | None = None,
    module_names: Sequence[str] = (),
    *,
    is_main_process: bool = True,
) -> None:
    """Write a prefix, and tensors of modules that were trained with it, as `Stored.save_pretrained` promises."""
    state = prefix.state_dict() if state is None else state
    if is_main_process:
        check_names(state, prefix.state_dict(), "prefix")
    contents = {"prefix": as_bytes(state)} | ({"modules": as_bytes(modules)} if modules else {})
    if not is_main_process:  # but gathered with the others
        return
    names = {
        kind: f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors" for kind, content in contents.items()
    }
    config = {
        "format_version": FORMAT_VERSION if modules else 1,
        "class": _name_in_files(class_of(prefix)),
        "weights": names["prefix"],
        "base": prefix.base,
        "sites": {
            site: {
                "prefix_length": encoder.prefix_length,
                "num_layers": encoder.num_layers,
                "num_heads": encoder.num_heads,
                "head_dim": encoder.head_dim,
                "mid_dim": encoder.mid_dim,
                "dropout": encoder.dropout.p,
            }
            for site, encoder in prefix.encoders.items()
        },
    }
    if modules:
        config["modules"] = {"names": list(module_names), "weights": names["modules"]}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder) as alone:
        if (folder / CONFIG_NAME).is_file():
            read_config(folder)  # refuses to replace what it does not know
        for kind, content in contents.items():
            # Even where the file is there already: from now on it is young.
            replace_file(folder / names[kind], content)
        replace_file(folder / CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())
        _remove_leftovers(folder, set(names.values()), alone)


def _name_in_files(prefix_class: type) -> str:
    """A Prefix is called T5Prefix there, as it was when it served T5 alone: earlier versions read the same files."""
    return "T5Prefix" if prefix_class.__name__ == "Prefix" else prefix_class.__name__


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that at every moment either the old content is there, or the new."""
    unfinished = path.with_name(f".unfinished-{uuid.uuid4().hex}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Wait until no other process or thread saves in `folder`; False at once where that cannot be known."""
    locked, handle = False, None
    try:
        if fcntl is not None:
            with suppress(OSError):  # a network file system may lock files alone, or nothing
                handle = os.open(folder, os.O_RDONLY)
                fcntl.flock(handle, fcntl.LOCK_EX)
                locked = True
        yield locked
    finally:
        if locked:
            fcntl.flock(handle, fcntl.LOCK_UN)  # not by closing alone: a forked process may have the handle too
        if handle is not None:
            os.close(handle)


def _remove_leftovers(folder: Path, named: set[str], alone: bool) -> None:
    """Remove weights that the json does not name, and what a killed process has begun."""
    if not alone:  # another may have replaced the json since
        config = read_config(folder)
        named = named | {config["weights"], config.get("modules", {}).get("weights")}
    newest = (folder / CONFIG_NAME).stat().st_mtime  # by the file system's clock
    for path in folder.iterdir():
        with suppress(FileNotFoundError, PermissionError):  # removed by another; on Windows, being read
            is_old = newest - path.stat().st_mtime > SECONDS_TO_FINISH
            if _LEFTOVER.fullmatch(path.name) and path.name not in named:
                removable = alone or is_old
            else:
                removable = is_old and _UNFINISHED.fullmatch(path.name)
            if removable:
                path.unlink()


def as_bytes(tensors: dict[str, Tensor]) -> bytes:
    """The content of a safetensors file; of tensors that are sharded, the whole."""
    # Cloned, since safetensors refuses tensors that share their memory, as tied weights do.
    return save({name: whole(tensor).detach().clone().contiguous() for name, tensor in tensors.items()})


def check_serialization(safe_serialization: bool) -> None:
    """Raise ValueError unless safetensors are wanted."""
    if not safe_serialization:
        raise ValueError(
            "a prefix is saved as safetensors alone, since opening a pickle can run any code: leave out "
            "safe_serialization=False"
        )


def check_names(given: dict, own: dict, kind: str) -> None:
    """Raise ValueError if a state dict has other names than it should."""
    if given.keys() != own.keys():
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        raise ValueError(
            f"the state_dict does not fit the {kind}: it lacks {missing[:3]} and has unknown {unknown[:3]}"
        )


# --- reading ---------------------------------------------------------------------------------------------------------


def read(prefix_class: type, folder: str | os.PathLike, **hub) -> tuple[Stored, dict[str, Tensor], list[str]]:
    """The prefix, the tensors of modules that were trained with it, and those modules' names.

    Raises what `Stored.from_pretrained` raises.
    """
    folder = local_folder(folder, **hub)
    config, weights, modules = _read_files(folder)
    if config["class"] != _name_in_files(prefix_class):
        raise ValueError(f"the prefix in {folder} was saved by {config['class']}: load it with that class")
    with _refusing(folder):
        with torch.device("meta"):  # draws no random numbers
            encoders = {site: PrefixEncoder(**sizes) for site, sizes in config["sites"].items()}
        prefix = prefix_class(encoders, config["base"])
        prefix.load_state_dict(_tensors(weights), assign=True)  # assigned, they keep their dtype
        modules = {} if modules is None else _tensors(modules)
    return prefix.eval(), modules, config.get("modules", {}).get("names", [])


def _tensors(content: bytes) -> dict[str, Tensor]:
    # Cloned, they lie in memory as torch's own do, without which matrix products differ in the last bit.
    return {name: tensor.clone() for name, tensor in load(content).items()}


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"the prefix saved in {folder} cannot be read: {error}") from error


def _read_files(folder: Path) -> tuple[dict, bytes, bytes | None]:
    """The json and what it names. Saved over in the meantime, that may be gone: then it is read again."""
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{folder} holds no saved prefix: {CONFIG_NAME} is missing")
    for _ in range(READINGS):
        config = read_config(folder)
        try:
            weights = (folder / config["weights"]).read_bytes()
            modules = (folder / config["modules"]["weights"]).read_bytes() if "modules" in config else None
            return config, weights, modules
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            time.sleep(0.01)
    raise ValueError(f"the prefix saved in {folder} cannot be read: {missing} is missing")


def read_config(folder: Path) -> dict:
    """The json of a saved prefix. Raises ValueError, with what is wrong, unless this version can read it."""

    def refuse(reason):
        raise ValueError(f"the prefix saved in {folder} cannot be read: {reason}")

    def check(config, expected: dict, where: str):
        for key, kind in expected.items():
            if not isinstance(config, dict) or not isinstance(config.get(key), kind):
                refuse(f"{where} needs a {key!r} of type {kind.__name__}")
        if Path(config["weights"]).name != config["weights"]:
            refuse(f"its weights {config['weights']!r} must lie in the same folder")

    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except ValueError as error:
        refuse(f"{CONFIG_NAME} is not json ({error})")
    check(config, {"format_version": int, "class": str, "weights": str, "base": dict, "sites": dict}, CONFIG_NAME)
    if config["format_version"] > FORMAT_VERSION:
        refuse(f"its format_version {config['format_version']} is newer than {FORMAT_VERSION}: update helpers")
    if "modules" in config:
        check(config["modules"], {"names": list, "weights": str}, f"'modules' in {CONFIG_NAME}")
    return config


# --- which base it is for --------------------------------------------------------------------------------------------


def hub_name(model: PreTrainedModel) -> dict[str, str]:
    """`{"name": ...}` if the model was loaded from the hub by that name, else nothing: folders are nobody else's."""
    name = getattr(model.config, "_name_or_path", "")
    return {"name": name} if name and is_repo_id(name) and not os.path.exists(name) else {}


def fingerprint(sites: dict[str, Site]) -> dict[str, list[float]]:
    """32 weights of each stack, spread over its tensors, to recognise the base by.

    None of a stack that is quantised, or has weights that are not in memory. Of weights that are sharded (FSDP2) the
    whole is gathered, one tensor after the other: every process has to ask.
    """
    samples = {}
    for name in ("encoder", "decoder"):
        if name in sites:
            parameters = list(sites[name].layers.parameters())
            chosen = [parameters[i * len(parameters) // 32].detach() for i in range(32)]
            first = next(child for child in sites[name].attentions[0].children() if hasattr(child, "weight"))
            if class_of(first) in (nn.Linear, Conv1D) and all(map(_is_plain, chosen)):
                samples[name] = [round(whole(tensor).flatten()[tensor.numel() // 3].item(), 6) for tensor in chosen]
    return samples


def _is_plain(tensor: Tensor) -> bool:
    return (type(tensor) is Tensor or is_sharded(tensor)) and tensor.is_floating_point() and not tensor.is_meta


def same_weights(ours: dict, theirs: dict[str, list[float]]) -> bool:
    """Whether the stacks known to both fingerprints agree, up to the rounding of float16 and bfloat16."""
    return all(
        torch.allclose(torch.tensor(ours[site]), torch.tensor(theirs[site]), rtol=2**-8, atol=2e-6)
        for site in {"encoder", "decoder"} & ours.keys() & theirs.keys()
    )
