"""A prefix on the Hugging Face hub: its files are uploaded with a card and fetched here.

Not by huggingface_hub's ModelHubMixin: that one deletes a config.json which it finds in the folder, be it the base's,
writes its own and a README beside every save, and asks for a config.json of which a prefix has none.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, ModelCardData, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn

from helpers.tuning.sharded import is_sharded

PAPER = "https://aclanthology.org/2021.acl-long.353/"
PATTERNS = ("prefix_config.json", "prefix-*.safetensors", "modules-*.safetensors")


def local_folder(
    folder: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> Path:
    """`folder` itself, or where huggingface_hub has put the repository `user/name`; OSError if it cannot be had."""
    path = Path(folder)
    if path.is_dir() or not (isinstance(folder, str) and is_repo_id(folder)):
        return path
    with _in_one_sentence(f"{folder!r} is no folder here, and could not be read from the Hugging Face hub"):
        return Path(
            snapshot_download(
                folder,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                allow_patterns=list(PATTERNS),
            )
        )


def upload(
    prefix: nn.Module,
    repo_id: str,
    save_to: Callable[[str], None],
    loading: str,
    *,
    base_model: str | None = None,
    tags: Sequence[str] = (),
    commit_message: str = "Upload prefix",
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload the files that `save_to` writes to a folder, as `Prefix.push_to_hub` promises.

    `loading` is the code that the card shows.
    """
    if any(map(is_sharded, prefix.parameters())):
        raise ValueError(
            "a sharded prefix cannot be uploaded as it is: call save_pretrained(folder) in every process, then in one "
            f"from_pretrained(folder).push_to_hub({repo_id!r})"
        )
    with TemporaryDirectory() as folder:
        save_to(folder)
        with _in_one_sentence(f"the prefix could not be uploaded to {repo_id!r}"):
            api = HfApi(token=token)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            if not api.file_exists(repo_id, "README.md", revision=revision):  # one that was edited stays
                readme = card(prefix, repo_id, loading, base_model=base_model, tags=tags)
                Path(folder, "README.md").write_text(readme, encoding="utf-8")
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
                delete_patterns=list(PATTERNS),  # those that these replace
            )


def card(prefix: nn.Module, repo_id: str, loading: str, *, base_model: str | None, tags: Sequence[str]) -> str:
    """The README of a repository: what the prefix is, and `loading`, the lines that load it."""
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="adapter" if base_model else None,
        library_name="attention-to-prefix",
        tags=list(dict.fromkeys(["prefix-tuning", getattr(prefix, "base", {}).get("model_type", "t5"), *tags])),
    )
    rows = [
        f"| {site} | {encoder.prefix_length} | {encoder.num_layers} | {encoder.num_heads} | {encoder.head_dim} |"
        for site, encoder in prefix.encoders.items()
    ]
    numbers = sum(parameter.numel() for parameter in prefix.parameters())
    frozen = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "a frozen model"
    return "\n".join(
        [
            f"---\n{data.to_yaml()}\n---\n",
            f"# {repo_id.split('/')[-1]}\n",
            f"A prefix for {frozen}: {numbers:,} learned numbers, which make keys and values in front of its own "
            f"([Li and Liang 2021]({PAPER})).\n",
            "| attention | slots | layers | heads | head_dim |\n|---|---|---|---|---|",
            *rows,
            f"\n```python\n{loading}\n```",
            *_how_to_install(),
            "",
        ]
    )


def lines_that_load(prefix_class: type, base_model: str | None, repo_id: str) -> str:
    name, package = prefix_class.__name__, prefix_class.__module__
    imports = [f"from {package} import {name}", "from helpers import load_base"]
    if package.startswith("helpers."):
        imports = [f"from helpers import {name}, load_base"]
    base = f"load_base({base_model!r})" if base_model else "load_base(...)  # the model that it was trained for"
    loading = [f"prefix = {name}.from_pretrained({repo_id!r})", "detach = prefix.attach(model)"]
    return "\n".join([*imports, "", f"model, tokenizer = {base}", *loading])


def _how_to_install() -> list[str]:
    try:
        addresses = metadata("attention-to-prefix").get_all("Project-URL", [])
    except PackageNotFoundError:  # helpers was copied, not installed
        return []
    repositories = [address.removeprefix("Repository, ") for address in addresses if address.startswith("Repository, ")]
    return [f'\n`pip install "git+{address}"` brings `helpers`.' for address in repositories]


@contextmanager
def _in_one_sentence(what: str) -> Iterator[None]:
    """Raise OSError, starting with `what`, for everything that the hub or the way to it refuses."""
    try:
        yield
    except (AttributeError, TypeError):  # a mistake in a call
        raise
    except Exception as error:  # without a connection its class differs between versions of huggingface_hub
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise OSError(f"{what}: {reason}") from error


def is_repo_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1
