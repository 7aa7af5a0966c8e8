"""FSDP2: `fully_shard` spreads the weights of model and prefix over two processes on this CPU."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from test_engines import SIZES, TOKENIZER, assert_equal, largest_difference, make_model, numbers
from torch import distributed
from transformers import T5ForSequenceClassification

from helpers.tuning.attach import T5Prefix
from helpers.tuning.engines import T5WithPrefix
from helpers.tuning.families import sites_of
from helpers.tuning.store import fingerprint
from helpers.tuning.training import collate

RANK = textwrap.dedent(
    """
    import sys
    import torch
    from pathlib import Path
    from torch import distributed
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from transformers import T5Config, T5ForConditionalGeneration, T5ForSequenceClassification
    from helpers import T5Prefix, T5WithPrefix

    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    given = torch.load(folder / "given.pt", weights_only=True)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    batch = given["batch"]

    def make_model():
        model = T5ForConditionalGeneration(T5Config(**given["config"]))
        model.load_state_dict(given["model"])
        return model.eval()

    def make_prefix(model):
        prefix = T5Prefix.for_model(model, prefix_length=4, mid_dim=11)
        prefix.load_state_dict(given["prefix"])
        return prefix

    def shard_blocks(model):
        for stack in (model.encoder, model.decoder):
            for block in stack.block:
                fully_shard(block, mesh=mesh)

    def whole():
        model = make_model()
        prefixed = T5WithPrefix(model, make_prefix(model))
        fully_shard(prefixed, mesh=mesh)
        return prefixed

    def as_the_trainer_does():
        model = make_model()
        prefixed = T5WithPrefix(model, make_prefix(model))
        shard_blocks(model)
        fully_shard(prefixed, mesh=mesh)
        register_fsdp_forward_method(prefixed, "generate")
        return prefixed

    def base_before():
        model = make_model()
        shard_blocks(model)
        fully_shard(model, mesh=mesh)
        return T5WithPrefix(model, make_prefix(model))

    def generate(prefixed):
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return prefixed.eval().generate(**source, max_new_tokens=5, do_sample=False)

    results = {}
    for make in (whole, as_the_trainer_does, base_before):
        prefixed, result = make(), {}
        result["base"] = prefixed.prefix.base
        result["first"] = generate(prefixed)
        optimizer = torch.optim.SGD((p for p in prefixed.parameters() if p.requires_grad), lr=0.5)
        prefixed.train()
        result["losses"] = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = prefixed(**batch).loss
            loss.backward()
            optimizer.step()
            result["losses"].append(loss.item())
        result["then"] = generate(prefixed)
        name = make.__name__
        prefixed.save_pretrained(folder / name, is_main_process=rank == 0)
        prefixed.prefix.save_pretrained(folder / f"{name}_by_all")
        gathered = get_model_state_dict(prefixed, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        prefixed.save_pretrained(folder / f"{name}_gathered", is_main_process=rank == 0, state_dict=gathered)
        results[name] = result

    def sentence(call):
        try:
            call()
        except ValueError as error:
            return str(error)

    model = make_model()
    prefix = make_prefix(model)
    fully_shard(prefix, mesh=mesh)
    alone = T5WithPrefix(model, prefix)
    prefix.save_pretrained(folder / "alone")
    results["alone"] = {
        "forward": sentence(lambda: alone(**batch)),
        "generate": sentence(lambda: generate(alone)),
        "fold": sentence(prefix.fold),
        "push": sentence(lambda: alone.push_to_hub("user/name")),
    }

    model = T5ForSequenceClassification(T5Config(**given["config"], num_labels=3))
    model.load_state_dict(given["classifier"])
    head = T5WithPrefix(model, make_prefix(model), also_train=("classification_head",))
    fully_shard(head, mesh=mesh)
    head.save_pretrained(folder / "head")

    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()
    """
)
VARIANTS = ("whole", "as_the_trainer_does", "base_before")
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


def batch_of_two():
    return collate(TOKENIZER, [("a source", "ab"), ("bb", "longer")])


def make_prefixed():
    model = make_model()
    torch.manual_seed(1)
    return T5WithPrefix(model, T5Prefix.for_model(model, prefix_length=4, mid_dim=11))


def make_classifier():
    return make_model(T5ForSequenceClassification, num_labels=3)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The folder with what the ranks have saved, and what each has seen."""
    folder, prefixed = tmp_path_factory.mktemp("fsdp"), make_prefixed()
    given = {
        "config": SIZES,
        "model": prefixed.model.state_dict(),
        "prefix": prefixed.prefix.state_dict(),
        "classifier": make_classifier().state_dict(),
        "batch": batch_of_two(),
    }
    torch.save(given, folder / "given.pt")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    """The same in one process: generated texts before and after two steps, losses, the module."""
    prefixed, batch, losses = make_prefixed(), batch_of_two(), []
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    texts = [prefixed.eval().generate(**source, max_new_tokens=5, do_sample=False)]
    optimizer = torch.optim.SGD(prefixed.prefix.parameters(), lr=0.5)
    prefixed.train()
    for _ in range(2):
        optimizer.zero_grad()
        loss = prefixed(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    texts.append(prefixed.eval().generate(**source, max_new_tokens=5, do_sample=False))
    return texts, losses, prefixed


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_and_training_equal_those_of_one_process(sharded, alone, variant):
    texts, losses, _ = alone
    for result in sharded[1]:
        assert torch.equal(result[variant]["first"], texts[0])
        assert torch.equal(result[variant]["then"], texts[1])
        assert result[variant]["losses"] == pytest.approx(losses, rel=1e-5)
    assert losses[1] < losses[0] - 1e-3


@pytest.mark.parametrize("suffix", ["", "_by_all", "_gathered"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sharded_prefix_is_saved_whole(sharded, alone, variant, suffix):
    saved = numbers(T5Prefix.from_pretrained(sharded[0] / f"{variant}{suffix}"))
    trained = numbers(alone[2].prefix)
    assert largest_difference(saved, trained) < 1e-5
    assert largest_difference(saved, numbers(make_prefixed().prefix)) > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sharded_base_has_the_fingerprint_of_the_whole(sharded, variant):
    expected = fingerprint(sites_of(make_model()))
    assert {name: len(values) for name, values in expected.items()} == {"encoder": 32, "decoder": 32}
    assert [result[variant]["base"] for result in sharded[1]] == [expected, expected]


def test_a_prefix_that_is_sharded_by_itself_says_so_and_is_saved(sharded):
    folder, results = sharded
    for result in results:
        for call in ("forward", "generate", "fold"):
            assert "the prefix is sharded and nothing has gathered it" in result["alone"][call]
        assert "call save_pretrained(folder) in every process" in result["alone"]["push"]
    assert_equal(numbers(T5Prefix.from_pretrained(folder / "alone")), numbers(make_prefixed().prefix))
    assert json.loads((folder / "alone" / "prefix_config.json").read_text(encoding="utf-8"))["class"] == "T5Prefix"


def test_a_sharded_head_is_saved_whole(sharded):
    model = make_classifier()
    wanted = {name: tensor.clone() for name, tensor in model.classification_head.state_dict().items()}
    for parameter in model.classification_head.parameters():
        parameter.data.zero_()
    again = T5WithPrefix.from_pretrained(model, sharded[0] / "head")
    assert_equal(again.model.classification_head.state_dict(), wanted)
