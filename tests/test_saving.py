"""A saved prefix: whole at every moment, whoever saves and reads beside; what a folder keeps; known by its base."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from helpers.prefix import PrefixEncoder
from helpers.tuning import store
from helpers.tuning.attach import PrefixPerRow, T5Prefix
from helpers.tuning.engines import T5WithPrefix
from helpers.tuning.store import CONFIG_NAME

SIZES = {"vocab_size": 60, "d_model": 16, "d_kv": 5, "num_heads": 3, "d_ff": 23, "num_layers": 2}
needs_locks = pytest.mark.skipif(store.fcntl is None, reason="this system has no locks for folders")


def make_prefix(seed: int, base: dict | None = None) -> T5Prefix:
    torch.manual_seed(seed)
    return T5Prefix({"decoder": PrefixEncoder(4, 2, 3, 5)}, base)


def make_model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**SIZES)).eval()


def is_equal(one: T5Prefix, other: T5Prefix) -> bool:
    return torch.equal(one.encoders["decoder"].embedding, other.encoders["decoder"].embedding)


def weight_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix == ".safetensors"}


def named(folder: Path) -> set[str]:
    return {json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))["weights"]}


def make_old(path: Path) -> None:
    stamp = path.stat().st_mtime - store.SECONDS_TO_FINISH - 10
    os.utime(path, (stamp, stamp))


@pytest.fixture(params=[pytest.param(True, marks=needs_locks), False], ids=["locks", "no locks"])
def locks(request, monkeypatch) -> bool:
    if not request.param:
        monkeypatch.setattr(store, "fcntl", None)
    return request.param


# --- several at once -------------------------------------------------------------------------------------------------


def test_who_is_late_saving_a_does_not_name_weights_that_another_has_removed(tmp_path, monkeypatch, locks):
    """A is saved; B is saved in the middle of A's second save, before its json."""
    a, b = make_prefix(1), make_prefix(2)
    a.save_pretrained(tmp_path)
    other = threading.Thread(target=b.save_pretrained, args=[tmp_path])
    replace, order = store.replace_file, []

    def late(path, content):
        if path.name == CONFIG_NAME and threading.current_thread() is threading.main_thread():
            other.start()
            other.join(timeout=0.5)  # for good without locks; with them it waits until this save is over
        replace(path, content)
        order.append(path.name)

    monkeypatch.setattr(store, "replace_file", late)
    a.save_pretrained(tmp_path)
    if not locks:
        assert is_equal(T5Prefix.from_pretrained(tmp_path), a)
    other.join()
    assert is_equal(T5Prefix.from_pretrained(tmp_path), b if locks else a)
    assert order[1 if locks else 2] == CONFIG_NAME
    assert len(order) == 4
    assert weight_files(tmp_path) > named(tmp_path) if not locks else weight_files(tmp_path) == named(tmp_path)


def save_often(folder, seeds, with_locks, saves):
    if not with_locks:
        store.fcntl = None
    prefixes = [make_prefix(seed) for seed in seeds]
    for number in range(saves):
        prefixes[number % len(prefixes)].save_pretrained(folder)


def read_often(folder, seeds, savers_are_done, reads, failures):
    known = [make_prefix(seed) for seed in seeds]
    while not savers_are_done.is_set():
        try:
            prefix = T5Prefix.from_pretrained(folder)
            assert any(is_equal(prefix, each) for each in known), "half of one, half of another"
        except Exception as error:
            failures.put(f"{type(error).__name__}: {error}")
        with reads.get_lock():
            reads.value += 1


def test_three_savers_and_a_reader_are_never_in_each_others_way(tmp_path, locks):
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    savers_are_done, reads, failures = context.Event(), context.Value("i", 0), context.Queue()
    seeds = [[1, 2, 9], [3, 4, 9], [5, 6, 9]]  # 9: the same content from all
    everybodys = [seed for own in seeds for seed in own]
    make_prefix(1).save_pretrained(tmp_path)
    savers = [context.Process(target=save_often, args=(tmp_path, own, locks, 150)) for own in seeds]
    reader = context.Process(target=read_often, args=(tmp_path, everybodys, savers_are_done, reads, failures))
    for process in (reader, *savers):
        process.start()
    for process in savers:
        process.join()
    savers_are_done.set()
    reader.join()
    assert [process.exitcode for process in (reader, *savers)] == [0] * 4
    assert failures.empty(), failures.get()
    assert reads.value >= 50
    assert any(is_equal(T5Prefix.from_pretrained(tmp_path), make_prefix(seed)) for seed in everybodys)
    if locks:
        assert weight_files(tmp_path) == named(tmp_path)
    else:
        assert len(weight_files(tmp_path)) <= 7  # one a content, all young
    assert not list(tmp_path.glob(".unfinished-*"))


@needs_locks
def test_a_process_that_was_forked_while_saving_does_not_keep_the_lock(tmp_path):
    with store._alone_in(tmp_path) as alone:
        assert alone
        going_on = multiprocessing.get_context("fork").Event()
        child = multiprocessing.get_context("fork").Process(target=going_on.wait)
        child.start()
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        store.fcntl.flock(handle, store.fcntl.LOCK_EX | store.fcntl.LOCK_NB)  # BlockingIOError if it is held
    finally:
        os.close(handle)
        going_on.set()
        child.join()


@needs_locks
def test_a_file_system_that_refuses_to_lock_a_folder_is_one_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(9, "Bad file descriptor")

    make_prefix(1).save_pretrained(tmp_path)
    monkeypatch.setattr(store.fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    make_prefix(2).save_pretrained(tmp_path)
    assert len(weight_files(tmp_path)) == 2
    assert is_equal(T5Prefix.from_pretrained(tmp_path), make_prefix(2))
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_who_was_told_of_a_file_that_is_gone_reads_again(tmp_path, monkeypatch):
    make_prefix(1).save_pretrained(tmp_path)
    read_config, asked = store.read_config, []

    def outdated(folder):
        asked.append(folder)
        now = read_config(folder)
        return now if len(asked) > 3 else {**now, "weights": "prefix-0123456789abcdef.safetensors"}

    monkeypatch.setattr(store, "read_config", outdated)
    assert is_equal(T5Prefix.from_pretrained(tmp_path), make_prefix(1))
    assert len(asked) == 4


def test_what_is_read_lies_in_memory_as_torchs_own_does(tmp_path):
    """At multiples of 64 bytes: elsewhere, matrix products may differ in the last bit."""
    T5Prefix.for_model(make_model(), prefix_length=3, mid_dim=5).save_pretrained(tmp_path)
    parameters = list(T5Prefix.from_pretrained(tmp_path).parameters())
    assert len(parameters) == 15
    assert {parameter.data_ptr() % 64 for parameter in parameters} == {0}


def test_weights_that_stay_missing_are_named(tmp_path):
    make_prefix(1).save_pretrained(tmp_path)
    (name,) = weight_files(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"cannot be read: {name} is missing"):
        T5Prefix.from_pretrained(tmp_path)


def test_what_is_left_over_is_removed_when_that_is_safe(tmp_path, locks):
    stranger = "prefix-0123456789abcdef.safetensors"
    young, old = tmp_path / f".unfinished-{'0' * 32}", tmp_path / f".unfinished-{'1' * 32}"
    mine = [tmp_path / name for name in ("prefix-german.safetensors", "config.json", ".unfinished-work")]
    make_prefix(1).save_pretrained(tmp_path)
    (first,) = weight_files(tmp_path)
    for path in (tmp_path / stranger, young, old, *mine):
        path.write_bytes(b"x")
    for path in (old, *mine):
        make_old(path)
    make_prefix(2).save_pretrained(tmp_path)
    assert weight_files(tmp_path) - named(tmp_path) - {mine[0].name} == (set() if locks else {first, stranger})
    assert young.exists()
    assert not old.exists()
    if not locks:
        make_old(tmp_path / first)
        make_prefix(2).save_pretrained(tmp_path)
        assert weight_files(tmp_path) - named(tmp_path) - {mine[0].name} == {stranger}
    assert all(path.read_bytes() == b"x" for path in mine)
    assert is_equal(T5Prefix.from_pretrained(tmp_path), make_prefix(2))


def test_without_locks_what_another_has_named_since_is_kept(tmp_path, monkeypatch):
    """Both saves are done when the first looks for leftovers; the second's file is old, as after a long sleep."""
    monkeypatch.setattr(store, "fcntl", None)
    remove = store._remove_leftovers

    def after_another(folder, *args):
        monkeypatch.setattr(store, "_remove_leftovers", remove)
        make_prefix(2).save_pretrained(tmp_path)
        make_old(tmp_path / named(tmp_path).pop())
        remove(folder, *args)

    monkeypatch.setattr(store, "_remove_leftovers", after_another)
    make_prefix(1).save_pretrained(tmp_path)
    assert is_equal(T5Prefix.from_pretrained(tmp_path), make_prefix(2))


def test_the_files_are_replaced_whole_and_the_json_after_the_weights(tmp_path, monkeypatch):
    make_prefix(1).save_pretrained(tmp_path)
    replace, replaced = os.replace, []

    def watched(source, target):
        replaced.append(Path(target).name)
        assert is_equal(T5Prefix.from_pretrained(tmp_path), make_prefix(1))
        if len(replaced) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    with pytest.raises(KeyboardInterrupt):
        make_prefix(2).save_pretrained(tmp_path)
    monkeypatch.undo()
    assert re.fullmatch(r"prefix-[0-9a-f]{16}\.safetensors", replaced[0])
    assert replaced[1:] == [CONFIG_NAME]
    assert is_equal(T5Prefix.from_pretrained(tmp_path), make_prefix(1))


# --- accelerate's idiom ----------------------------------------------------------------------------------------------


@pytest.fixture(params=[lambda: make_prefix(1), lambda: make_prefixed(1)], ids=["T5Prefix", "T5WithPrefix"])
def savable(request):
    return request.param()


def make_prefixed(seed: int) -> T5WithPrefix:
    torch.manual_seed(seed)
    model = make_model()
    return T5WithPrefix(model, T5Prefix.for_model(model, prefix_length=4, sites=("decoder",)))


def test_only_the_main_process_writes(tmp_path, savable):
    folder = tmp_path / "saved"
    savable.save_pretrained(folder, is_main_process=False, save_function=torch.save, state_dict={})
    assert not folder.exists()
    savable.save_pretrained(folder, is_main_process=True, save_function=torch.save)
    assert len(list(folder.iterdir())) == 2


def test_a_state_dict_is_written_instead_of_the_own_numbers(tmp_path, savable):
    state = {name: tensor + 1 for name, tensor in savable.state_dict().items()}
    savable.save_pretrained(tmp_path, state_dict=state, safe_serialization=True)
    saved = T5Prefix.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, saved[name.removeprefix("prefix.")]) for name, tensor in state.items())
    with pytest.raises(ValueError, match=r"does not fit .*: it lacks \['.*embedding'\] and has unknown \['module"):
        savable.save_pretrained(tmp_path, state_dict={f"module.{name}": t for name, t in state.items()})


def test_a_pickle_is_refused(tmp_path, savable):
    with pytest.raises(ValueError, match="saved as safetensors alone"):
        savable.save_pretrained(tmp_path / "saved", safe_serialization=False)
    assert not (tmp_path / "saved").exists()


def test_several_prefixes_are_saved_one_by_one(tmp_path):
    model = make_model()
    prefixed = T5WithPrefix(model, PrefixPerRow([T5Prefix.for_model(model), None]))
    with pytest.raises(ValueError, match="save each of its prefixes"):
        prefixed.save_pretrained(tmp_path)


# --- the base --------------------------------------------------------------------------------------------------------


def test_the_bases_name_on_the_hub_is_kept_but_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model()
    for name, kept in (
        ("google-t5/t5-small", True),
        ("out/t5", False),
        ("gone/away/t5", False),
        (str(tmp_path), False),
        ("", False),
    ):
        Path("out/t5").mkdir(parents=True, exist_ok=True)
        model.config._name_or_path = name
        prefix = T5Prefix.for_model(model, mid_dim=3)
        prefix.fold().save_pretrained(tmp_path / "saved")
        base = T5Prefix.from_pretrained(tmp_path / "saved").base
        assert base == prefix.base
        assert base.get("name") == (name if kept else None)
        assert {"encoder", "decoder"} < {*base, "name"}
    model.config._name_or_path = "another/name"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        T5Prefix.for_model(model).check_fits(make_model())


def test_warnings_point_at_the_line_that_caused_them():
    """In a process of its own: the shape checks of the tests put frames of theirs in between."""
    script = """
import torch, warnings
from helpers import T5Prefix, T5WithPrefix
from transformers import T5Config, T5ForConditionalGeneration
models = [T5ForConditionalGeneration(T5Config(**{sizes})) for _ in range(2)]
with warnings.catch_warnings(record=True) as caught:
    T5WithPrefix(models[0], T5Prefix.for_model(models[1]))
print([(warning.filename, warning.lineno) for warning in caught if "other weights" in str(warning.message)])
""".replace("{sizes}", repr(SIZES))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[('<string>', 7)]\n"
