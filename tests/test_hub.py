"""Prefixes on the Hugging Face hub, which is played by a folder: nothing here has a network."""

import fnmatch
import re
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch
import yaml
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import T5Config, T5ForConditionalGeneration, T5ForSequenceClassification

import helpers
from helpers.tuning import hub
from helpers.tuning.attach import PrefixPerRow, T5Prefix
from helpers.tuning.engines import T5WithPrefix
from helpers.tuning.peft_prefix import PeftT5Prefix

SIZES = {"vocab_size": 60, "d_model": 16, "d_kv": 5, "num_heads": 3, "d_ff": 23, "num_layers": 2}
SIZES |= {"decoder_start_token_id": 0, "eos_token_id": 1}
IDS = torch.tensor([[5, 6, 7, 1]])


def make_model(model_class=T5ForConditionalGeneration, name="google-t5/t5-small", **sizes):
    torch.manual_seed(0)
    model = model_class(T5Config(**SIZES, **sizes)).eval()
    model.config._name_or_path = name
    return model


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Response:
    """As much of an answer of the hub as its errors look at."""

    request, headers = None, {}

    def __init__(self, status_code: int):
        self.status_code = status_code


class Hub:
    """Repositories as folders; what is called is held to huggingface_hub's own signatures."""

    def __init__(self, root: Path, monkeypatch):
        self.root, self.calls, self.tokens = root, {}, []
        self.api = create_autospec(HfApi, instance=True)
        self.api.create_repo.side_effect = self.create_repo
        self.api.upload_folder.side_effect = self.upload_folder
        self.api.file_exists.side_effect = lambda repo_id, name, revision=None: (root / repo_id / name).is_file()
        monkeypatch.setattr(hub, "HfApi", lambda token: self.tokens.append(token) or self.api)
        download = create_autospec(snapshot_download, side_effect=self.download)
        monkeypatch.setattr(hub, "snapshot_download", download)

    def create_repo(self, repo_id, **options):
        self.calls["create_repo"] = options
        (self.root / repo_id).mkdir(parents=True, exist_ok=options["exist_ok"])
        return type("RepoUrl", (), {"repo_id": repo_id})

    def upload_folder(self, *, repo_id, folder_path, delete_patterns, **options):
        self.calls["upload_folder"] = options
        repository = self.root / repo_id
        for name in files(repository) - files(Path(folder_path)):
            if any(fnmatch.fnmatch(name, pattern) for pattern in delete_patterns):
                (repository / name).unlink()
        shutil.copytree(folder_path, repository, dirs_exist_ok=True)
        return f"https://huggingface.co/{repo_id}/commit/1"

    def download(self, repo_id, *, allow_patterns, **options):
        self.calls["download"] = options
        if not (self.root / repo_id).is_dir():
            raise RepositoryNotFoundError(
                "404 Client Error.\n\nRepository Not Found for url: x.", response=Response(404)
            )
        folder = self.root / "cache" / repo_id
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in (self.root / repo_id).iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, folder)
        return str(folder)


@pytest.fixture
def played(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Hub(tmp_path / "hub", monkeypatch)


def test_what_is_uploaded_is_read_again(played):
    prefix = T5Prefix.for_model(make_model(), prefix_length=3, mid_dim=4)
    address = prefix.push_to_hub(
        "user/german", private=True, token="secret", revision="trial", create_pr=True, commit_message="Try it"
    )
    assert address == "https://huggingface.co/user/german/commit/1"
    assert played.tokens == ["secret"]
    assert played.calls["create_repo"] == {"private": True, "exist_ok": True}
    assert played.calls["upload_folder"] == {"commit_message": "Try it", "revision": "trial", "create_pr": True}
    played.api.create_branch.assert_called_once_with("user/german", branch="trial", exist_ok=True)
    again = T5Prefix.from_pretrained(
        "user/german", revision="v1", token="secret", cache_dir="here", force_download=True, local_files_only=True
    )
    assert played.calls["download"] == {
        "revision": "v1",
        "token": "secret",
        "cache_dir": "here",
        "force_download": True,
        "local_files_only": True,
    }
    assert all(torch.equal(a, b) for a, b in zip(prefix.parameters(), again.parameters(), strict=True))
    assert files(played.root / "cache" / "user/german") == files(played.root / "user/german") - {"README.md"}


def test_an_upload_replaces_the_weights_and_leaves_other_files_and_an_edited_card(played):
    model = make_model()
    for seed in (1, 2):
        torch.manual_seed(seed)
        prefix = T5Prefix.for_model(model, prefix_length=3)
        prefix.push_to_hub("user/german")
        if seed == 1:
            repository = played.root / "user/german"
            (repository / "README.md").write_text("edited", encoding="utf-8")
            (repository / "model.safetensors").write_bytes(b"x")
    assert len(list(repository.glob("prefix-*.safetensors"))) == 1
    assert (repository / "README.md").read_text(encoding="utf-8") == "edited"
    assert (repository / "model.safetensors").read_bytes() == b"x"
    assert torch.equal(T5Prefix.from_pretrained("user/german").key_values("cross"), prefix.key_values("cross"))
    played.api.create_branch.assert_not_called()


def card_of(repository: Path) -> tuple[dict, str, str]:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    _, head, text = readme.split("---\n", 2)
    return yaml.safe_load(head), text, re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]


@pytest.mark.parametrize("prefix_class", [T5Prefix, PeftT5Prefix])
def test_the_cards_lines_load_the_prefix(played, monkeypatch, prefix_class):
    prefix = prefix_class.for_model(make_model(), prefix_length=3, sites=("decoder",))
    prefix.push_to_hub("user/german", tags=["german", "t5"])
    head, text, code = card_of(played.root / "user/german")
    assert head == {
        "base_model": "google-t5/t5-small",
        "base_model_relation": "adapter",
        "library_name": "attention-to-prefix",
        "tags": ["prefix-tuning", "t5", "german"],
    }
    assert "| decoder | 3 | 2 | 3 | 5 |" in text
    assert "180 learned numbers" in text
    assert "pip install" in text
    seen = []
    monkeypatch.setattr("helpers.bases.load.load_base", lambda name: seen.append(name) or (make_model(), None))
    names = {}
    exec(code, names)
    assert seen == ["google-t5/t5-small"]
    assert type(names["prefix"]) is prefix_class
    with prefix.attached(make_model()) as model:
        assert torch.equal(names["model"](IDS, decoder_input_ids=IDS).logits, model(IDS, decoder_input_ids=IDS).logits)
    assert len([line for line in code.splitlines() if line and "import" not in line]) == 3


def test_the_card_of_a_base_without_a_name_on_the_hub(played):
    prefix = T5Prefix.for_model(make_model(name=""), prefix_length=3)
    prefix.push_to_hub("user/german")
    head, _, code = card_of(played.root / "user/german")
    assert "base_model" not in head
    assert "load_base(...)  # the model that it was trained for" in code
    prefix.push_to_hub("user/named", base_model="google/mt5-small")
    assert card_of(played.root / "user/named")[0]["base_model"] == "google/mt5-small"


def test_a_model_with_its_prefix_uploads_the_prefix_and_never_the_base(played):
    prefixed = T5WithPrefix(make_model(), T5Prefix.for_model(make_model(), prefix_length=3))
    prefixed.push_to_hub("user/german", private=True)
    assert {name.split("-")[0] for name in files(played.root / "user/german")} == {
        "README.md",
        "prefix_config.json",
        "prefix",
    }
    assert played.calls["create_repo"]["private"] is True
    again = T5WithPrefix.from_pretrained(make_model(), "user/german", revision="main")
    assert played.calls["download"]["revision"] == "main"
    batch = {"input_ids": IDS, "decoder_input_ids": IDS}
    assert torch.equal(again(**batch).logits, prefixed(**batch).logits)
    rows = T5WithPrefix(make_model(), PrefixPerRow([prefixed.prefix, None]))
    with pytest.raises(ValueError, match="save each of its prefixes"):
        rows.push_to_hub("user/rows")
    assert not (played.root / "user/rows").exists()


def test_the_card_of_a_prefix_with_a_head_loads_both(played, monkeypatch):
    model = make_model(T5ForSequenceClassification, num_labels=4)
    prefixed = T5WithPrefix(model, T5Prefix.for_model(model, prefix_length=3), also_train=("classification_head",))
    for parameter in model.classification_head.parameters():
        parameter.data.normal_()
    prefixed.push_to_hub("user/head")
    _, _, code = card_of(played.root / "user/head")
    seen = {}

    def load(name, **options):
        seen.update(options, name=name)
        return make_model(T5ForSequenceClassification, num_labels=options["num_labels"])

    monkeypatch.setattr(T5ForSequenceClassification, "from_pretrained", load)
    names = {}
    exec(code, names)
    assert seen == {"name": "google-t5/t5-small", "num_labels": 4}
    assert torch.equal(names["prefixed"](IDS).logits, prefixed.eval()(IDS).logits)
    with pytest.warns(UserWarning, match="classification_head of the model was trained with the prefix"):
        T5Prefix.from_pretrained("user/head")


# --- what cannot be had ----------------------------------------------------------------------------------------------


def test_a_missing_repository_is_one_sentence(played):
    with pytest.raises(OSError, match=r"^'user/nothing' is no folder here, and could not be read .*: 404") as caught:
        T5Prefix.from_pretrained("user/nothing")
    assert "\n" not in str(caught.value)


def test_a_repository_without_a_prefix_is_one_sentence(played):
    (played.root / "user/model").mkdir(parents=True)
    (played.root / "user/model/config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="holds no saved prefix"):
        T5Prefix.from_pretrained("user/model")


def test_without_a_network_either_way_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    prefix = T5Prefix.for_model(make_model())
    with pytest.raises(OSError, match=r"^'user/german' is no folder here, and could not be read") as reading:
        T5Prefix.from_pretrained("user/german", cache_dir=tmp_path)
    with pytest.raises(OSError, match=r"^the prefix could not be uploaded to 'user/german'") as writing:
        prefix.push_to_hub("user/german", token="none")
    assert "\n" not in str(reading.value) + str(writing.value)


def test_a_folder_is_a_folder_whatever_it_is_called(played):
    prefix = T5Prefix.for_model(make_model(), prefix_length=3)
    prefix.save_pretrained("user/german")
    T5Prefix.from_pretrained("user/german")
    for name in ("german", "./german", "runs/german/prefix", Path("user/nothing"), "/user/nothing"):
        with pytest.raises(FileNotFoundError, match="holds no saved prefix"):
            T5Prefix.from_pretrained(name)
    assert "download" not in played.calls
    with pytest.raises(TypeError, match="mid_dim"):
        T5WithPrefix.from_pretrained(make_model(), "user/german", mid_dim=3)


def test_every_name_that_a_card_imports_is_public():
    assert {"T5Prefix", "T5WithPrefix", "PeftT5Prefix", "load_base"} <= set(helpers.__all__)
