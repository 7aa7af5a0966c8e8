"""T5WithPrefix under the engines people train with: transformers' Trainer, accelerate, DistributedDataParallel."""

import copy
import inspect
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from transformers import (
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)
from transformers.models.t5.modeling_t5 import T5Attention

from helpers.tuning.attach import PrefixPerRow, T5Prefix, detach_prefix
from helpers.tuning.engines import T5WithPrefix
from helpers.tuning.training import collate, generate_texts

# Targets of different lengths: a mean over batches is not a mean over tokens.
PAIRS = [("a", "b"), ("bb", "c and more"), ("ccc", "d"), ("dddd", "e!"), ("eeeee", "f"), ("f", "g, the longest")] * 2
TOKENIZER = ByT5Tokenizer()
SIZES = {
    "vocab_size": 384,
    "d_model": 16,
    "d_kv": 5,
    "num_heads": 3,
    "d_ff": 23,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.2,
}


def make_model(model_class=T5ForConditionalGeneration, seed=0, **sizes):
    torch.manual_seed(seed)
    model = model_class(T5Config(**{**SIZES, **sizes})).eval()
    for parameter in model.parameters():  # away from the initialisation, where attention is nearly uniform
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def make_prefixed(model=None, seed=1, **options):
    model = model or make_model()
    torch.manual_seed(seed)
    return T5WithPrefix(model, T5Prefix.for_model(model, prefix_length=4, **options))


def features(pairs=PAIRS):
    return [
        {"input_ids": TOKENIZER(source).input_ids, "labels": TOKENIZER(target).input_ids, "source": source}
        for source, target in pairs
    ]


def make_trainer(folder, prefixed, pairs=PAIRS, trainer_class=Seq2SeqTrainer, compute_metrics=None, **options):
    options = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "predict_with_generate": True,
        "generation_max_length": 6,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 0,
        **options,
    }
    return trainer_class(
        model=prefixed,
        args=Seq2SeqTrainingArguments(**options),
        train_dataset=features(pairs),
        eval_dataset=features(pairs),
        data_collator=DataCollatorForSeq2Seq(TOKENIZER, model=prefixed),
        processing_class=TOKENIZER,
        compute_metrics=compute_metrics,
    )


def checkpointing_option(**arguments):
    """The option's name in transformers: 5.15 called it gradient checkpointing."""
    fields = Seq2SeqTrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": arguments}


def numbers(prefix):
    return {name: tensor.detach().clone() for name, tensor in prefix.state_dict().items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one), "not the same bits"


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


# --- Trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mid_dim", [None, 11])
def test_the_trainer_trains_the_prefix_and_leaves_the_base_bit_identical(tmp_path, mid_dim):
    prefixed = make_prefixed(mid_dim=mid_dim)
    base, before = copy.deepcopy(prefixed.model.state_dict()), numbers(prefixed.prefix)
    trainer = make_trainer(tmp_path, prefixed, max_steps=20, learning_rate=0.1 if mid_dim is None else 0.03)
    trainer.train()
    assert_equal(base, prefixed.model.state_dict())
    assert all(parameter.grad is None for parameter in prefixed.model.parameters())
    after = numbers(prefixed.prefix)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    detach_prefix(prefixed.model)
    assert not prefixed.model.encoder._forward_pre_hooks


def test_the_bases_dropout_stays_off_while_the_prefix_trains(tmp_path):
    prefixed = make_prefixed(dropout=0.5)
    seen = []
    prefixed.model.decoder.register_forward_hook(
        lambda *_: seen.append([module.training for module in prefixed.modules() if isinstance(module, nn.Dropout)])
    )
    make_trainer(tmp_path, prefixed, max_steps=1).train()
    dropouts = [name for name, module in prefixed.named_modules() if isinstance(module, nn.Dropout)]
    assert {name for name, training in zip(dropouts, seen[0], strict=True) if training} == {
        f"prefix.encoders.{site}.dropout" for site in ("encoder", "decoder", "cross")
    }


def test_evaluation_generates_what_the_attached_model_generates(tmp_path):
    prefixed = make_prefixed()
    trainer = make_trainer(tmp_path, prefixed, learning_rate=0.3, per_device_eval_batch_size=5)
    trainer.train()
    output = trainer.predict(features())
    ids = torch.tensor(output.predictions).masked_fill(torch.tensor(output.predictions) == -100, 0)
    texts = TOKENIZER.batch_decode(ids, skip_special_tokens=True)
    plain = make_model()
    with prefixed.prefix.eval().attached(plain):
        expected = generate_texts(plain, TOKENIZER, [source for source, _ in PAIRS], max_new_tokens=5)
    without = generate_texts(make_model(), TOKENIZER, [source for source, _ in PAIRS], max_new_tokens=5)
    assert texts == expected != without
    assert output.metrics["test_loss"] > 0


def test_an_attached_model_without_the_wrapper_trains_nothing(tmp_path):
    """What T5Prefix.attach warns of in its documentation; if transformers raises an error one day, it may go."""
    model = make_model().requires_grad_(False)
    prefix = T5Prefix.for_model(model, prefix_length=4)
    before = numbers(prefix)
    with prefix.attached(model):
        make_trainer(tmp_path, model, max_steps=1).train()
    assert_equal(before, numbers(prefix))


class Counting(T5Prefix):
    calls = 0

    def key_values(self, site):
        Counting.calls += 1
        return super().key_values(site)


def test_the_prefix_is_evaluated_once_for_each_generation_and_each_loss(tmp_path):
    model = make_model()
    trainer = make_trainer(tmp_path, T5WithPrefix(model, Counting.for_model(model, prefix_length=4)))
    Counting.calls = 0
    trainer.predict(features())  # 12 pairs in batches of 8
    assert Counting.calls == 2 * 2 * len(("encoder", "decoder", "cross"))


def test_a_generation_config_given_to_the_trainer_is_the_one_used(tmp_path):
    prefixed = make_prefixed()
    config = GenerationConfig(max_length=7, decoder_start_token_id=0, pad_token_id=0)
    trainer = make_trainer(tmp_path, prefixed, generation_config=config, generation_max_length=None)
    assert prefixed.model.generation_config.max_length == 7
    assert trainer.predict(features()).predictions.shape == (len(PAIRS), 7)


def test_checkpoints_hold_the_prefix_alone(tmp_path):
    prefixed = make_prefixed()
    make_trainer(tmp_path, prefixed, save_strategy="steps", save_steps=3).train()
    weights = tmp_path / "checkpoint-6" / "model.safetensors"
    assert_equal(load_file(weights), {f"prefix.{name}": tensor for name, tensor in numbers(prefixed.prefix).items()})
    own = 4 * sum(parameter.numel() for parameter in prefixed.prefix.parameters())
    base = 4 * sum(parameter.numel() for parameter in prefixed.model.parameters())
    assert own < weights.stat().st_size < own + 1000 < base
    optimizer = (tmp_path / "checkpoint-6" / "optimizer.pt").stat().st_size
    assert 2 * own < optimizer < 2 * own + 5000


@pytest.mark.parametrize("options", [{}, {"mid_dim": 11, "dropout": 0.3}], ids=["flat", "mlp and dropout"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resuming_equals_training_through_bit_for_bit(tmp_path, options, accumulation):
    settings = {
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": accumulation,
        "warmup_steps": 2,
    }
    through = make_prefixed(**options)
    logs = make_trainer(tmp_path / "through", through, **settings)
    logs.train()

    make_trainer(tmp_path / "cut", make_prefixed(**options), **settings).train()
    resumed = make_prefixed(seed=2, **options)  # starts from other numbers than those it has to take over
    assert largest_difference(numbers(resumed.prefix), numbers(make_prefixed(**options).prefix)) > 1e-3
    trainer = make_trainer(tmp_path / "cut", resumed, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert_equal(numbers(resumed.prefix), numbers(through.prefix))
    values = [[(log.get("loss"), log.get("eval_loss")) for log in t.state.log_history[:-1]] for t in (logs, trainer)]
    assert values[0] == values[1]


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    make_trainer(tmp_path, make_prefixed(), save_strategy="steps", save_steps=3).train()
    for options in ({"mid_dim": 11}, {"sites": ("decoder",)}):
        other = make_prefixed(**options)
        with pytest.raises(RuntimeError, match="encoders"):
            other.load_state_dict(load_file(tmp_path / "checkpoint-3" / "model.safetensors"))


def test_load_best_model_at_end(tmp_path):
    # The "best" step is told to the Trainer: the second of three.
    scores = iter([0.1, 0.9, 0.5])
    prefixed = make_prefixed()
    trainer = make_trainer(
        tmp_path,
        prefixed,
        compute_metrics=lambda _: {"score": next(scores)},
        load_best_model_at_end=True,
        metric_for_best_model="score",
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
    )
    trainer.train()
    assert trainer.state.best_global_step == 4
    kept = {
        name.removeprefix("prefix."): t for name, t in load_file(tmp_path / "checkpoint-4/model.safetensors").items()
    }
    last = {
        name.removeprefix("prefix."): t for name, t in load_file(tmp_path / "checkpoint-6/model.safetensors").items()
    }
    assert_equal(numbers(prefixed.prefix), kept)
    assert largest_difference(kept, last) > 1e-3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulated_gradients_equal_those_of_the_big_batch(tmp_path, smoothing):
    """SGD, whose step is proportional to the gradient; targets of different lengths."""
    results = []
    for batch_size, accumulation in ((12, 1), (3, 4), (5, 3)):  # the last micro-batch of 5, 5, 2 is a smaller one
        prefixed = make_prefixed()
        trainer = make_trainer(
            tmp_path,
            prefixed,
            optim="sgd",
            learning_rate=5.0,
            max_grad_norm=0.0,
            max_steps=2,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            label_smoothing_factor=smoothing,
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((numbers(prefixed.prefix), losses))
    (whole, losses), *accumulated = results
    assert largest_difference(whole, numbers(make_prefixed().prefix)) > 1e-2
    for parts, parts_losses in accumulated:
        assert largest_difference(whole, parts) < 1e-5
        assert parts_losses == pytest.approx(losses, rel=1e-4)


def test_the_loss_over_given_items_is_a_share_of_the_whole_loss():
    prefixed = make_prefixed()
    whole, halves = collate(TOKENIZER, PAIRS[:4]), [collate(TOKENIZER, PAIRS[:2]), collate(TOKENIZER, PAIRS[2:4])]
    items = whole["labels"].ne(-100).sum()
    parts = [prefixed(**half, num_items_in_batch=items).loss for half in halves]
    assert sum(parts).item() == pytest.approx(prefixed(**whole).loss.item(), rel=1e-5)
    means = [prefixed(**half).loss for half in halves]
    assert abs(sum(means).item() / 2 - prefixed(**whole).loss.item()) > 1e-3, "the lengths do not differ enough"


def test_the_trainer_keeps_and_drops_the_columns_that_it_would_of_the_plain_model(tmp_path):
    model, prefixed = make_model(), make_prefixed()
    of_t5, of_ours = (make_trainer(tmp_path, each) for each in (model, prefixed))
    assert of_t5.label_names == of_ours.label_names == ["labels"]
    named = set(inspect.signature(prefixed.forward).parameters) - {"inputs", "num_items_in_batch"}
    per_example = {name for name in inspect.signature(model.forward).parameters if "cache" not in name}
    # What is no column of a data set may still be passed by keyword.
    assert per_example - named <= {
        "kwargs",
        "past_key_values",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
    batch = next(iter(of_ours.get_train_dataloader()))
    assert set(batch) == set(next(iter(of_t5.get_train_dataloader())))
    assert "source" not in batch
    assert "decoder_input_ids" in batch
    collator = of_ours._get_collator_with_removed_columns(lambda kept: kept)
    assert set(collator([{"decoder_attention_mask": [1], "inputs_embeds": [0.0], "source": "a"}])[0]) == {
        "decoder_attention_mask",
        "inputs_embeds",
    }


def test_bfloat16_autocast_trains_a_float32_prefix(tmp_path):
    prefixed = make_prefixed(mid_dim=11)
    dtypes = set()
    prefixed.model.encoder.block[0].layer[0].SelfAttention.q.register_forward_hook(
        lambda module, args, output: dtypes.add(output.dtype) if torch.is_grad_enabled() else None
    )
    trainer = make_trainer(tmp_path, prefixed, bf16=True, max_steps=12, learning_rate=0.02)
    trainer.train()
    assert dtypes == {torch.bfloat16}
    assert {parameter.dtype for parameter in prefixed.parameters()} == {torch.float32}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])

    exact = make_trainer(tmp_path, make_prefixed(mid_dim=11), max_steps=12, learning_rate=0.02)
    exact.train()
    assert losses == pytest.approx([entry["loss"] for entry in exact.state.log_history if "loss" in entry], rel=0.05)


def count_attention(prefixed, calls):
    for module in prefixed.model.modules():
        if isinstance(module, T5Attention):
            module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_and_changes_nothing(tmp_path, reentrant):
    results, counts = [], []
    for options in ({}, checkpointing_option(use_reentrant=reentrant)):
        prefixed, calls = make_prefixed(), []
        count_attention(prefixed, calls)
        trainer = make_trainer(tmp_path, prefixed, max_steps=3, optim="sgd", learning_rate=5.0, **options)
        trainer.train()
        counts.append(len(calls))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((numbers(prefixed.prefix), losses))
    assert counts[0] == 3 * (3 + 2 * 2)  # steps times the attentions of 3 encoder and 2 decoder layers
    assert counts[1] == 2 * counts[0]
    (plain, losses), (checkpointed, checkpointed_losses) = results
    assert losses == pytest.approx(checkpointed_losses, rel=1e-5)
    assert largest_difference(plain, numbers(make_prefixed().prefix)) > 1e-2
    assert largest_difference(plain, checkpointed) < 1e-5


def test_checkpointing_enabled_after_train_still_checkpoints():
    prefixed, calls = make_prefixed(), []
    prefixed.train()
    enable = getattr(prefixed, "activation_checkpointing_enable", None) or prefixed.gradient_checkpointing_enable
    enable()
    count_attention(prefixed, calls)
    prefixed(**collate(TOKENIZER, PAIRS)).loss.backward()
    assert len(calls) == 2 * (3 + 2 * 2)


@pytest.mark.parametrize("options", [{"mid_dim": 11}, {"dropout": 0.1}], ids=["mlp", "dropout"])
def test_reentrant_checkpointing_with_an_mlp_or_dropout_is_refused_with_the_fix(tmp_path, options):
    refused = make_trainer(tmp_path, make_prefixed(**options), **checkpointing_option(use_reentrant=True))
    with pytest.raises(ValueError, match=r"reentrant gradient checkpointing .*'use_reentrant': False"):
        refused.train()
    make_trainer(tmp_path, make_prefixed(**options), **checkpointing_option(use_reentrant=False)).train()


def test_a_quantised_base_is_not_refused(tmp_path):
    model = make_model()
    model.is_quantized = True
    with pytest.raises(ValueError, match="purely quantized"):
        make_trainer(tmp_path, model)
    make_trainer(tmp_path, make_prefixed(model), max_steps=1).train()


# --- accelerate ------------------------------------------------------------------------------------------------------


def test_the_plain_accelerate_loop_equals_a_loop_of_ones_own(tmp_path):
    batches = [collate(TOKENIZER, PAIRS[start : start + 4]) for start in (0, 4, 8)]

    def make_optimizer(prefixed):
        return torch.optim.AdamW((p for p in prefixed.parameters() if p.requires_grad), lr=0.1)

    by_hand = make_prefixed(mid_dim=11)
    optimizer = make_optimizer(by_hand)
    for batch in batches * 2:
        optimizer.zero_grad()
        by_hand(**batch).loss.backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizer.step()

    accelerator = Accelerator(cpu=True)
    prefixed = make_prefixed(mid_dim=11)
    optimizer = make_optimizer(prefixed)
    prefixed, optimizer, loader = accelerator.prepare(
        prefixed, optimizer, torch.utils.data.DataLoader(batches, batch_size=None)
    )
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(prefixed(**batch).loss)
            accelerator.clip_grad_norm_(prefixed.parameters(), 1.0)
            optimizer.step()
        if epoch == 0:
            accelerator.save_state(tmp_path)
    through = numbers(accelerator.unwrap_model(prefixed).prefix)
    assert_equal(through, numbers(by_hand.prefix))

    assert (tmp_path / "model.safetensors").stat().st_size < 100_000
    accelerator.load_state(tmp_path)
    assert largest_difference(through, numbers(accelerator.unwrap_model(prefixed).prefix)) > 1e-3
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(prefixed(**batch).loss)
        accelerator.clip_grad_norm_(prefixed.parameters(), 1.0)
        optimizer.step()
    assert_equal(through, numbers(accelerator.unwrap_model(prefixed).prefix))


# --- DistributedDataParallel -----------------------------------------------------------------------------------------

RANK = textwrap.dedent(
    """
    import sys
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from transformers import T5Config, T5ForConditionalGeneration
    from helpers.tuning.engines import T5WithPrefix
    from helpers.tuning.attach import T5Prefix

    torch.set_num_threads(1)
    folder, rank = sys.argv[1], int(sys.argv[2])
    given = torch.load(f"{folder}/given.pt", weights_only=True)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = T5ForConditionalGeneration(T5Config(**given["config"]))
    model.load_state_dict(given["model"])
    prefixed = T5WithPrefix(model, T5Prefix.for_model(model, prefix_length=4, mid_dim=11))
    if rank == 0:  # the other rank takes over the numbers of rank 0
        prefixed.load_state_dict(given["prefix"])
    parallel = DistributedDataParallel(prefixed)

    def state():
        return {name: tensor.clone() for name, tensor in parallel.state_dict().items()}

    optimizer = torch.optim.SGD((p for p in parallel.parameters() if p.requires_grad), lr=0.5)
    half = {name: tensor[rank::2].contiguous() for name, tensor in given["batch"].items()}
    items = given["batch"]["labels"].ne(-100).sum()
    states = [state()]
    for step in range(3):
        optimizer.zero_grad()
        # DistributedDataParallel averages over the ranks; the sum is wanted
        (2 * parallel(**half, num_items_in_batch=items).loss).backward()
        if step == 0:
            gradients = [p.grad.clone() for p in prefixed.prefix.parameters()]
        optimizer.step()
    states.append(state())
    parallel.load_state_dict(states[0])  # strict: neither missing nor unexpected keys
    torch.save({"states": states, "gradients": gradients, "again": state()}, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
    """
)


def test_two_processes_have_the_gradients_of_one_on_the_whole_batch(tmp_path):
    prefixed, batch = make_prefixed(mid_dim=11), collate(TOKENIZER, PAIRS)
    given = {"config": SIZES, "model": prefixed.model.state_dict(), "prefix": prefixed.state_dict(), "batch": batch}
    torch.save(given, tmp_path / "given.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]

    assert_equal(results[0]["states"][0], {f"module.prefix.{n}": t for n, t in numbers(prefixed.prefix).items()})
    optimizer = torch.optim.SGD(prefixed.prefix.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        prefixed(**batch).loss.backward()
        if step == 0:
            for parameter, gradient in zip(prefixed.prefix.parameters(), results[0]["gradients"], strict=True):
                assert gradient.abs().max() > 1e-4
                assert torch.allclose(parameter.grad, gradient, atol=1e-6)
        optimizer.step()
    alone = {f"module.prefix.{name}": tensor for name, tensor in numbers(prefixed.prefix).items()}
    for before, after in zip(*(result["states"] for result in results), strict=True):
        assert_equal(before, after)  # of both ranks
    assert largest_difference(alone, results[0]["states"][1]) < 1e-5
    assert largest_difference(alone, results[0]["states"][0]) > 1e-3
    assert_equal(results[0]["again"], results[0]["states"][0])


# --- the module itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_uses_its_own_prefix(copied):
    prefixed, batch = make_prefixed(), collate(TOKENIZER, PAIRS)
    twin, before = copied(prefixed), prefixed(**batch).logits
    assert torch.equal(twin(**batch).logits, before)
    for parameter in twin.prefix.parameters():
        parameter.data.add_(1.0)
    assert torch.equal(prefixed(**batch).logits, before)
    assert not torch.allclose(twin(**batch).logits, before, atol=1e-3)
    twin.load_state_dict(prefixed.state_dict())
    assert torch.equal(twin(**batch).logits, before)


def test_an_object_that_is_not_made_yet_has_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'model'"):
        _ = T5WithPrefix.__new__(T5WithPrefix).config


def test_several_prefixes_are_one_state():
    model = make_model()
    prefixes = [T5Prefix.for_model(model, prefix_length=length) for length in (2, 3)]
    prefixed = T5WithPrefix(model, PrefixPerRow([*prefixes, None]))
    state = prefixed.state_dict()
    assert {name.split(".")[2] for name in state} == {"0", "1"}
    prefixed.load_state_dict(state)
    batch = collate(TOKENIZER, PAIRS[:3])
    prefixed(**batch).loss.backward()
    assert all(parameter.grad is not None for each in prefixes for parameter in each.parameters())


def test_every_input_of_the_model_reaches_it():
    prefixed, plain = make_prefixed(), make_model().requires_grad_(False)
    embeds, decoder_embeds = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    ids, decoder_ids = torch.tensor([[5, 6, 7, 8, 1]] * 2), torch.tensor([[0, 5, 6, 7]] * 2)
    mask, decoder_mask = torch.tensor([[1, 1, 1, 0, 0]] * 2), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    with prefixed.prefix.attached(plain):
        encoder_outputs = plain.encoder(input_ids=ids)
        for source in ({"input_ids": ids}, {"inputs_embeds": embeds}, {"encoder_outputs": encoder_outputs}):
            for target in ({"decoder_input_ids": decoder_ids}, {"decoder_inputs_embeds": decoder_embeds}):
                masks = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
                whole, unmasked = (plain(**source, **target, **each).logits for each in (masks, {}))
                assert torch.equal(prefixed(**source, **target, **masks).logits, whole)
                assert torch.equal(prefixed(**source, **target).logits, unmasked)
                assert not torch.allclose(whole[0], unmasked[0])
                assert not torch.allclose(whole[1], whole[0], atol=1e-4)
    seen = {}
    prefixed.model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    prefixed(input_ids=ids, labels=ids)
    assert set(seen) == {"input_ids", "labels"}, "what was not given is passed on"
    assert len(prefixed(ids, mask, decoder_input_ids=decoder_ids, output_hidden_states=True).decoder_hidden_states) == 3


def test_models_with_other_heads(tmp_path):
    encoder = make_prefixed(make_model(T5EncoderModel), sites=("encoder",))
    hidden = encoder(input_ids=torch.tensor([[5, 6, 1]])).last_hidden_state
    assert hidden.shape == (1, 3, 16)
    classifier = make_prefixed(make_model(T5ForSequenceClassification, num_labels=4))
    batch = {"input_ids": torch.tensor([[5, 1], [6, 1], [7, 1]]), "labels": torch.tensor([0, 2, 3])}
    half = {name: tensor[:2] for name, tensor in batch.items()}
    last = {name: tensor[2:] for name, tensor in batch.items()}
    parts = classifier(**half, num_items_in_batch=3).loss + classifier(**last, num_items_in_batch=3).loss
    assert parts.item() == pytest.approx(classifier(**batch).loss.item(), rel=1e-5)
