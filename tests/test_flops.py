"""FLOPs and bytes of real rows: by hand, and against torch's own counter over the learner's real code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpcgrpo import flops, tiny
from hpcgrpo.flops import Meter, Share
from hpcgrpo.generation.decoded import Decoded
from hpcgrpo.generation.transformers import TransformersGenerator
from hpcgrpo.learning.attention import Layout
from hpcgrpo.learning.fsdp import PolicyModel, take_computed
from hpcgrpo.learning.packing import pack_row
from hpcgrpo.learning.passes import Computed, Passes
from hpcgrpo.planner import hardware, shapes
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.types import MicroBatch, Piece, Request, Row, Sampling

aten = torch.ops.aten


def small(**changes: Any) -> Shape:
    """2 layers, 3 query heads of 2 over 1 key-value head, 10 x 4 embedding."""
    sizes: dict[str, Any] = {
        "name": "small",
        "hidden": 4,
        "intermediate": 5,
        "layers": 2,
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 2,
        "vocabulary": 10,
        "tied": False,
        "attention_bias": False,
        "qk_norm": False,
        "kind": "dense",
        "parameters": 1000,
    }
    return Shape(**(sizes | changes))


# A layer's matrices: queries and output 4 x 6 each, keys and values 4 x 2 each, feed-forward 3 x 4 x 5.
LAYER = 24 + 24 + 8 + 8 + 60


def test_the_flops_of_a_pass_by_hand() -> None:
    linear, attention, head = flops.forward_flops(small(), Passes(tokens=7, pairs=11, targets=3))
    assert linear == 2 * 7 * 2 * LAYER
    assert attention == 2 * (2 * 11 * 6) * 2  # scores and values, 6 numbers of a query's heads, 2 layers
    assert head == 2 * 3 * 40
    forward = linear + attention + head
    computed = Computed(Passes(7, 11, 3), Passes(7, 11, 3))
    assert flops.model_flops(small(), computed) == forward + 3 * forward
    again = attention / 2 + head
    assert flops.hardware_flops(small(), computed, checkpointing=False) == 4 * forward + again
    layers = linear - 2 * 7 * 2 * 20 + attention  # all of a layer but its last matrix
    assert flops.hardware_flops(small(), computed, checkpointing=True) == 4 * forward + again + layers


@pytest.mark.parametrize(
    ("layout", "pairs"),
    [
        (Layout((3,), ((),)), 6),  # 1 + 2 + 3
        (
            Layout((2,), ((2, 1),)),
            3 + 3 + 1 + 3 * 2,
        ),  # the prefix once; each tail itself and all of the prefix
        (Layout((2, 1), ((2,), (1, 1))), 3 + 1 + 3 + 1 + 1 + 2 * 2 + 2 * 1),
        (Layout((2,), ((0, 3),)), 3 + 6 + 3 * 2),
    ],
)
def test_pairs_of_queries_and_keys_by_hand(layout: Layout, pairs: int) -> None:
    assert layout.plan.pairs == pairs


def test_a_shared_prefix_is_counted_once() -> None:
    apart = [pack_row((group(5, [3]),), torch.device("cpu")) for _ in range(2)]
    together = pack_row((group(5, [3, 3]),), torch.device("cpu"))
    one, two = Passes(), Passes()
    one.add(together)
    for row in apart:
        two.add(row)
    assert (one.tokens, two.tokens) == (5 + 2 + 2, 2 * (5 + 2))
    assert two.pairs - one.pairs == 15 and one.targets == two.targets == 6


# ---- torch's counter over the real code


def group(prefix: int, lengths: Sequence[int]) -> Piece:
    rows = [Row(i, tuple(range(2, 2 + n)), (-1.0,) * n, 1.0, 0.5) for i, n in enumerate(lengths)]
    return Piece(tuple(range(3, 3 + prefix)), tuple(rows))


def product(a: Sequence[int], b: Sequence[int]) -> int:
    return 2 * a[0] * a[1] * b[1]


def attend(products: int, first: int, *arguments: Any, out_shape: Any = None, **_: Any) -> int:
    """So many products of a query's and a key's size over whole squares; queries stand `first` among the arguments."""
    query, key = arguments[first : first + 2]
    batch, heads, length, size = query
    return products * 2 * batch * heads * length * key[2] * size


MAPPING: Mapping[Any, Any] = {  # what torch's counter leaves out
    aten.addmm_: lambda total, a, b, out_shape=None, **_: product(a, b),
    aten._scaled_dot_product_flash_attention_for_cpu: partial(attend, 2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: partial(attend, 5, 1),
}
ROWS: tuple[MicroBatch, ...] = (
    (group(7, [5, 9, 1]), group(4, [6])),
    (group(3, [12]),),
)


def squares(layout: Layout) -> int:
    """Pairs as the counter has them: it takes a causal square for a whole one."""
    own = [*layout.prefixes, *(t for tails in layout.tails for t in tails)]
    cross = [p * sum(tails) for p, tails in zip(layout.prefixes, layout.tails, strict=True)]
    return sum(length**2 for length in own) + sum(cross)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_learners_flops_are_those_that_torch_counts(checkpointing: bool) -> None:
    model = tiny.build_tiny_model(seed=0)
    model.set_attn_implementation("packed")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = PolicyModel(model, temperature=0.7, chunk_bytes=2**16, packed_attention=True).train()
    rows = [pack_row(m, torch.device("cpu")) for m in ROWS]
    with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
        with torch.no_grad():
            policy(rows[1])
        for row in rows:
            policy(row)[0].sum().backward()
    computed = take_computed(policy, None)
    assert computed.trained.tokens == (7 + 4 + 8 + 4 + 0 + 5) + (3 + 11)  # no completion's last token
    assert computed.trained.targets == 5 + 9 + 1 + 6 + 12
    assert take_computed(policy) == Computed()  # asked for, it begins anew
    shape = shapes._from_config("tiny", model.config.to_dict(), 0)
    computed.trained.pairs = sum(squares(row.layout) for row in rows)
    computed.forward.pairs = squares(rows[1].layout)
    assert flops.hardware_flops(shape, computed, checkpointing=checkpointing) == counter.get_total_flops()


# ---- decoding


def test_what_decoding_reads_by_hand() -> None:
    found = Decoded.side_by_side([(3, 4), (5, 1), (2, 0)])
    assert found.steps == 3  # the first token follows from the prompt
    assert found.pairs == 4 + 5 + 6  # tokens 2 to 4 of the first one; itself included
    assert found.then(Decoded(1, 2)) == Decoded(4, 17) and found.beside(Decoded(9, 2)) == Decoded(9, 17)
    assert Decoded.side_by_side([]) == Decoded()
    read = flops.decoded_bytes(small(), Decoded(steps=3, pairs=15), 2)
    assert read == 3 * (1000 - 40) * 2 + 15 * (2 * 2 * 2) * 2  # keys and values of 2 layers and 1 head of 2
    tied = flops.decoded_bytes(small(tied=True), Decoded(steps=1), 4)
    assert tied == 4000  # the table is the output layer, which is read whole


def test_the_in_process_generator_counts_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build_tiny_model(seed=0)
    generator = TransformersGenerator(model, decode=str, eos_token_ids=[1], max_batch_tokens=64)
    steps: list[int] = []
    step = TransformersGenerator._step

    def counted(self: Any, tokens: Any, rows: Any, cache: Any, live: int) -> Any:
        steps.append(
            int(rows.positions[:live].sum()) + live
        )  # keys that the live rows see, their own included
        return step(self, tokens, rows, cache, live)

    monkeypatch.setattr(TransformersGenerator, "_step", counted)
    requests = [Request(tuple(range(2, 2 + n)), seed) for n in (3, 9) for seed in range(4)]
    done = generator.generate(requests, Sampling(1.0, 12))
    found = generator.take_decoded()[""]
    assert found.steps == len(steps) > 11  # in several batches, one after the other
    lengths = [(len(r.prompt_token_ids), len(c.token_ids)) for r, c in zip(requests, done, strict=True)]
    assert found.pairs == sum(p + i for p, c in lengths for i in range(1, c))
    assert found.pairs <= sum(steps)  # which holds rows that ended and were not taken out yet
    assert generator.take_decoded() == {"": Decoded()}


# ---- rates


def meter(**changes: Any) -> Meter:
    a100 = hardware.by_device_name("NVIDIA A100-SXM4-80GB")
    values: dict[str, Any] = {
        "shapes": {"actor": small(), "peer": small(parameters=2000)},
        "hardware": a100,
        "checkpointing": False,
        "bf16": True,
        "learners": 2,
        "samplers": 4,
        "item_bytes": 2,
    }
    return Meter(**(values | changes))


SHARES = (
    Share({"actor": Computed(trained=Passes(7, 11, 3))}, {"actor": {"a": Decoded(5, 10)}}, 2.0, 3.0),
    Share(
        {"actor": Computed(), "peer": Computed(forward=Passes(7, 11, 3))},
        {"actor": {"a": Decoded(8, 20), "b": Decoded(1, 1)}, "peer": {"c": Decoded(2, 0)}},
        1.0,
        4.0,
    ),
)


def test_utilisation_by_hand() -> None:
    forward = 2 * 7 * 2 * LAYER + 2 * 2 * 11 * 6 * 2 + 2 * 3 * 40
    sums = meter().sums(SHARES)
    assert (sums["learn_seconds"], sums["decode_seconds"]) == (2.0, 4.0)  # of the slowest rank
    assert sums["model_flops"] == 4 * forward
    # engine a serves both ranks at once
    assert sums["decoded_bytes"] == (8 + 1) * 960 * 2 + 31 * 16 + 2 * 1960 * 2
    found = meter().rates(sums)
    assert found["learner_flops_per_second"] == 4 * forward / (2 * 2)
    assert found["mfu"] == pytest.approx(forward / 312e12)
    assert found["hfu"] > found["mfu"]
    assert found["decode_bytes_per_second"] == sums["decoded_bytes"] / (4 * 4)
    assert found["mbu"] == pytest.approx(sums["decoded_bytes"] / 16 / 2.039e12)


def test_what_is_not_known_is_left_out() -> None:
    sums = meter().sums(SHARES)
    nowhere = meter(hardware=None).rates(sums)
    assert nowhere.keys() == {"learner_flops_per_second", "decode_bytes_per_second"}
    assert meter(bf16=False).rates(sums).keys() == nowhere.keys() | {"mbu"}  # the peak is of another type
    assert "decoded_bytes" not in meter(item_bytes=None).sums(SHARES)
    assert meter(shapes={}).rates(meter(shapes={}).sums(SHARES)) == {}
    assert meter().rates({}) == {}


def test_engines_without_a_name_are_their_ranks_own() -> None:
    alone = [Share(decoded={"actor": {"": Decoded(5, 1)}}), Share(decoded={"actor": {"": Decoded(7, 1)}})]
    assert flops.servers_of(alone)["actor"] == {"rank 0": Decoded(5, 1), "rank 1": Decoded(7, 1)}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("nvidia h100 80gb hbm3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", None),  # slower
        ("NVIDIA A100-SXM4-40GB", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name: str, found: str | None) -> None:
    known = hardware.by_device_name(name)
    assert (known.name if known else None) == found
