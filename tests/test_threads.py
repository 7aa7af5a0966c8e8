"""One shared model: each thread and each asyncio task computes with the prefix that it entered, or with none."""

import asyncio
import contextvars
import copy
import random
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from test_t5 import GREEDY, SIZES, make_inputs, make_model, make_prefix, source

from helpers.tuning.attach import PrefixPerRow, detach_prefix
from helpers.tuning.routing import attached_prefix

pytestmark = pytest.mark.filterwarnings("ignore:this thread computes without a prefix")


class Served:
    """One model, and who may be asked: two prefixes of different sites and length, rows of both, the bare model."""

    def __init__(self):
        self.model, self.inputs = make_model(num_layers=1, num_decoder_layers=1), make_inputs(batch=2)
        german = make_prefix(self.model, 3, seed=1)
        italian = make_prefix(self.model, 5, seed=2, sites=("decoder", "cross"))
        rows = PrefixPerRow([italian, german])
        self.prefixes = {"german": german, "italian": italian, "rows": rows, "bare": None}
        self.wanted = {name: self.compute(name) for name in self.prefixes}
        for kind in (0, 1):
            answers = [answer[kind] for answer in self.wanted.values()]
            assert not any(torch.equal(a, b) for i, a in enumerate(answers) for b in answers[:i]), "a mix-up is unseen"

    def enter(self, name):
        prefix = self.prefixes[name]
        return nullcontext(self.model) if prefix is None else prefix.attached(self.model)

    def compute(self, name):
        with self.enter(name), torch.no_grad():
            return self.answer()

    def answer(self):
        return self.model(**self.inputs).logits, self.model.generate(**source(self.inputs), **GREEDY)

    def is_as_before(self):
        stacks = (self.model.encoder, self.model.decoder)
        assert not any(stack._forward_pre_hooks or stack._forward_pre_hooks_with_kwargs for stack in stacks)
        assert {stack.config._attn_implementation for stack in stacks} == {"sdpa"}
        assert all(map(torch.equal, self.compute("bare"), self.wanted["bare"]))


@pytest.fixture
def served():
    return Served()


@pytest.fixture
def hasty_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def stress(served, threads: int, entries: int) -> int:
    """Entries of all threads; each compares a forward pass, and every eighth a text, with what was computed alone."""

    def serve(seed):
        choose = random.Random(seed)
        for number in range(entries):
            name = choose.choice(list(served.prefixes))
            with served.enter(name), torch.no_grad():
                assert attached_prefix(served.model) is served.prefixes[name]
                assert torch.equal(served.model(**served.inputs).logits, served.wanted[name][0]), name
                if number % 8 == 0:
                    text = served.model.generate(**source(served.inputs), **GREEDY)
                    assert torch.equal(text, served.wanted[name][1]), name
        return entries

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(serve, range(threads)))


@pytest.mark.usefixtures("hasty_threads", "unchecked")
def test_four_threads_and_two_prefixes(served):
    assert stress(served, threads=4, entries=40) == 160
    served.is_as_before()


@pytest.mark.usefixtures("hasty_threads", "unchecked")
def test_entering_and_leaving_while_others_compute(served):
    """Threads that do nothing but enter and leave, so that hooks come and go at each moment of a bare forward pass."""
    over = threading.Event()

    def come_and_go(name):
        count = 0
        while not over.is_set():
            with served.enter(name):
                count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        comings = [pool.submit(come_and_go, name) for name in ("german", "italian")]
        try:
            for _ in range(60):
                assert torch.equal(served.compute("bare")[0], served.wanted["bare"][0])
        finally:
            over.set()
        assert all(coming.result() > 10 for coming in comings)
    served.is_as_before()


@pytest.mark.usefixtures("hasty_threads")
def test_of_many_that_attach_for_all_threads_at_once_one_gets_in(served):
    start = threading.Barrier(4)

    def attach(name):
        start.wait()
        try:
            return served.prefixes[name].attach(served.model)
        except ValueError:
            return None

    with ThreadPoolExecutor(4) as pool:
        for _ in range(25):
            got = [detach for detach in pool.map(attach, ["german", "italian", "rows", "german"]) if detach]
            assert len(got) == 1
            got[0]()
    served.is_as_before()


def in_a_thread(call):
    """Its result, in a thread that inherits nothing."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.Context().run, call).result()


def test_a_thread_inside_the_block_computes_with_the_bare_model_and_is_told_so(served):
    with served.enter("german"):
        with pytest.warns(UserWarning, match="does not inherit `attached`: enter it in the thread itself, or use"):
            got = in_a_thread(lambda: served.compute("bare"))
        assert all(map(torch.equal, got, served.wanted["bare"]))
        assert all(map(torch.equal, in_a_thread(lambda: served.compute("italian")), served.wanted["italian"]))
        with torch.no_grad():
            assert all(map(torch.equal, served.answer(), served.wanted["german"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served.compute("bare")
        with served.prefixes["german"].attach(served.model):  # for all threads
            assert all(map(torch.equal, in_a_thread(lambda: served.compute("bare")), served.wanted["german"]))


def test_who_attaches_for_all_and_who_enters_exclude_each_other(served):
    german, italian = served.prefixes["german"], served.prefixes["italian"]
    with german.attached(served.model):
        for attach in (italian.attach, lambda model: italian.attached(model).__enter__()):
            with pytest.raises(ValueError, match="carries a prefix already"):
                attach(served.model)
        with pytest.raises(ValueError, match="carries a prefix already"):
            in_a_thread(lambda: italian.attach(served.model))
    with german.attach(served.model), pytest.raises(ValueError, match="carries a prefix already"):
        in_a_thread(lambda: italian.attached(served.model).__enter__())
    served.is_as_before()


def test_asyncio_tasks_each_see_their_own(served):
    without_gradients = torch.no_grad()(served.answer)  # whose mode is the thread's: not around an await

    async def task(name):
        for _ in range(3):
            with served.enter(name):
                await asyncio.sleep(0)
                got = [without_gradients()]
                await asyncio.sleep(0)
                got.append(await asyncio.to_thread(without_gradients))  # with this task's context
                assert all(torch.equal(a, b) for each in got for a, b in zip(each, served.wanted[name], strict=True))
            await asyncio.sleep(0)

    async def serve():
        await asyncio.gather(*(task(name) for name in ("german", "bare", "italian", "rows", "german")))

    asyncio.run(serve())
    served.is_as_before()


def test_a_task_inherits_what_is_attached_where_it_is_made(served):
    async def serve():
        with served.enter("german"):
            return await asyncio.create_task(asyncio.to_thread(served.compute, "bare"))

    assert all(map(torch.equal, asyncio.run(serve()), served.wanted["german"]))
    served.is_as_before()


def test_the_end_may_come_in_another_context_than_the_beginning(served):
    first, second = contextvars.copy_context(), contextvars.copy_context()
    block = served.enter("german")
    first.run(block.__enter__)
    second.run(block.__exit__, None, None, None)
    served.is_as_before()
    with served.enter("italian"):  # in the first context the ended block is not taken for this one
        assert first.run(attached_prefix, served.model) is None


def test_detach_prefix_ends_every_attachment(served):
    block = served.enter("german")
    other = contextvars.copy_context()
    other.run(block.__enter__)
    detach_prefix(served.model)
    served.is_as_before()
    with served.enter("italian"):
        other.run(block.__exit__, None, None, None)
        assert attached_prefix(served.model) is served.prefixes["italian"]
    served.is_as_before()


def test_a_forward_pass_that_meets_the_hook_half_registered(served):
    """torch registers and removes it in two steps; in between, it calls it as one without keyword arguments."""
    stacks = (served.model.encoder, served.model.decoder)
    with served.enter("german"):
        registered = [dict(stack._forward_pre_hooks_with_kwargs) for stack in stacks]
        for stack in stacks:
            stack._forward_pre_hooks_with_kwargs.clear()
        assert all(map(torch.equal, in_a_thread(lambda: served.compute("bare")), served.wanted["bare"]))
        for stack, keys in zip(stacks, registered, strict=True):
            stack._forward_pre_hooks_with_kwargs.update(keys)
    served.is_as_before()


def test_a_copy_that_a_bare_thread_makes_is_bare(served):
    with served.enter("german"):
        twin = in_a_thread(lambda: copy.deepcopy(served.model))
    assert attached_prefix(twin) is None
    with torch.no_grad():
        assert torch.equal(twin(**served.inputs).logits, served.wanted["bare"][0])
        with served.prefixes["italian"].attached(twin):
            assert torch.equal(twin(**served.inputs).logits, served.wanted["italian"][0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_another_thread_computes_again_has_the_same_prefix(served, reentrant):
    """As on a GPU, where the backward pass runs in threads of its own, which inherit nothing."""
    model, prefix, inputs = served.model, served.prefixes["german"], served.inputs
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
            model.train()
        prefix.zero_grad()
        with prefix.attached(model):
            loss = model(**inputs, use_cache=False).logits.pow(2).sum()
            in_a_thread(loss.backward)
        gradients.append([parameter.grad.clone() for parameter in prefix.parameters()])
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients[0])
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(*gradients, strict=True))


def test_a_compiled_model_tells_threads_apart():
    """In a process of its own: the annotation checks of these tests cannot be compiled."""
    script = """
        import torch, threading
        from concurrent.futures import ThreadPoolExecutor
        from transformers import T5Config, T5ForConditionalGeneration
        from helpers.tuning.attach import T5Prefix
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**{sizes})).eval().requires_grad_(False)
        prefixes = [T5Prefix.for_model(model, prefix_length=n, init_std=1.0).requires_grad_(False) for n in (3, 5)]
        ids = torch.tensor([[5, 6, 7, 8], [9, 1, 0, 0]])
        batch = dict(input_ids=ids, attention_mask=(ids != 0).long(), decoder_input_ids=ids, use_cache=False)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)

        def compute(prefix, call):
            with torch.no_grad():
                if prefix is None:
                    return call(**batch).logits
                with prefix.attached(model):
                    return call(**batch).logits

        wanted = {prefix: compute(prefix, model) for prefix in (None, *prefixes)}
        inside, leave = threading.Barrier(3), threading.Barrier(3)

        def serve(prefix):
            for _ in range(2):
                assert (compute(prefix, compiled) - wanted[prefix]).abs().max() < 1e-6, prefix

        for prefix in (None, *prefixes, None, prefixes[0]):
            serve(prefix)
        with ThreadPoolExecutor(1) as pool, prefixes[1].attached(model):
            for prefix in (None, prefixes[0]):
                pool.submit(serve, prefix).result()
        with prefixes[1].attached(model), torch.no_grad():
            assert (compiled(**batch).logits - wanted[prefixes[1]]).abs().max() < 1e-6
        print("told apart")
    """.replace("{sizes}", repr(SIZES | {"num_layers": 1, "num_decoder_layers": 1}))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.stdout == "told apart\n", result.stderr[-3000:]
