"""The cost model of many GPUs against sums made by hand."""

import pytest
from benchmarks.scaling import (
    Cluster,
    Model,
    Speed,
    Step,
    all_to_all_seconds,
    causal_overhang,
    decode_seconds,
    fit_speed,
    gpus_for,
    ring_seconds,
    sent_bytes,
    sequences_per_gpu,
    shard_bytes,
    training_step,
)

CLUSTER = Cluster(node=4, within=100.0, between=10.0, reached=0.5, latency=0.0, memory=20_000, bandwidth=1000.0)
MODEL = Model(blocks=80, root=20, tensors=5, layers=3, handed_on=7, handed_on_per_token=2)
FLAT = Speed(per_token=0.01, per_length=0.0, shortest=1.0, measured={})


def step(way: str, n: int, *, sequences: int = 8, T: int = 64, speed: Speed = FLAT, **changes: float) -> Step:
    settings: dict = {"activations": 1.0, "tokens_at_once": 128} | changes
    made = training_step(MODEL, speed, CLUSTER, way, n=n, sequences=sequences, T=T, **settings)  # type: ignore[arg-type]
    assert made is not None
    return made


def test_a_line_is_found_and_a_measured_length_keeps_its_time() -> None:
    speed = fit_speed({10: 1 + 0.5 * 10, 40: 1 + 0.5 * 40, 100: 1 + 0.5 * 100}, shortest=3.0)
    assert (speed.per_token, speed.per_length) == pytest.approx((1, 0.5))
    assert speed.seconds_per_token(1000) == pytest.approx(501)
    off = fit_speed({10: 6.0, 40: 22.0}, shortest=3.0)._replace(measured={10: 6.5})
    assert off.seconds_per_token(10) == 6.5


def test_times_that_fall_with_the_length_are_taken_as_constant() -> None:
    speed = fit_speed({10: 2.2, 100: 1.8}, shortest=1.0)
    assert speed.per_length == 0
    assert 1.8 < speed.per_token < 2.2
    assert fit_speed({10: 2.0}, shortest=1.0).seconds_per_token(99) == 2.0
    with pytest.raises(ValueError, match="no measured times"):
        fit_speed({}, shortest=1.0)


def test_bytes_by_hand() -> None:
    assert sent_bytes(MODEL, "ddp", 1, 8, 64) == {}
    # Two processes: half of 400 bytes is sent to be summed, and half of the sums.
    assert sent_bytes(MODEL, "ddp", 2, 4, 64) == {"gradients": 400}
    # Per micro batch a process sends its half of the blocks twice and of the root once: 160 + 160 + 40.
    assert sent_bytes(MODEL, "fsdp", 2, 4, 64, micro_batches=3) == {"weights": 3 * 360, "gradients": 200}
    handed_on = 8 * (7 + 2 * 16) * 3  # eight sequences, shards of 16 tokens, to three others
    context = sent_bytes(MODEL, "context", 4, 8, 64)
    assert context == {"states": handed_on, "their gradients": handed_on, "gradients": 600}


def test_a_state_does_not_grow_with_the_length_and_keys_and_values_do() -> None:
    state, cache = MODEL._replace(handed_on_per_token=0), MODEL._replace(handed_on=0)
    assert shard_bytes(state, 64, 4) == shard_bytes(state, 2**22, 4) == 7
    assert shard_bytes(cache, 2**22, 4) == 2**21


def test_links_by_hand() -> None:
    assert ring_seconds(1000, 1, CLUSTER) == 0
    assert ring_seconds(1000, 4, CLUSTER) == 1000 / 50  # half of the stated speed is reached
    assert ring_seconds(1000, 8, CLUSTER) == 1000 / 20  # four adapters of 10
    assert all_to_all_seconds(700, 4, CLUSTER) == 700 / 50
    assert all_to_all_seconds(700, 8, CLUSTER) == 400 / 5  # four of seven others are in another machine
    slow = CLUSTER._replace(latency=3.0)
    assert ring_seconds(0, 8, slow) == all_to_all_seconds(0, 8, slow) == 9


def test_one_gpu_only_computes() -> None:
    made = step("ddp", 1)
    assert made.seconds == pytest.approx(512 * 0.01)
    assert (made.communication, made.sent, made.tokens) == (0, 0, 512)
    assert made.tokens_per_second == pytest.approx(100)
    assert made.memory == 16 * 100 + 128


def test_no_micro_batch_is_shorter_than_the_shortest() -> None:
    assert step("ddp", 4).compute == pytest.approx(1.28)
    assert step("ddp", 8).compute == 1.0  # 64 tokens would take 0.64


def test_ddp_hides_what_the_backward_pass_leaves_room_for() -> None:
    made = step("ddp", 4)  # 600 bytes at 50 per second behind two thirds of 1.28 seconds
    assert made.communication == pytest.approx(12)
    assert made.waiting == pytest.approx(12 - 1.28 * 2 / 3)
    assert step("ddp", 4, speed=FLAT._replace(per_token=1.0)).waiting == 0


def test_fsdp_waits_in_every_micro_batch_and_holds_a_share() -> None:
    made = step("fsdp", 2)  # two micro batches of 1.28 s; 360 bytes each, and 200 of gradients
    assert made.communication == pytest.approx(2 * 7.2 + 4)
    assert made.waiting == pytest.approx((7.2 - 1.28) + (7.2 + 4 - 1.28))
    assert made.memory == 16 * 100 / 2 + 128


def test_context_waits_for_everything() -> None:
    made = step("context", 4)
    assert made.waiting == made.communication == pytest.approx((936 + 936 + 600) / 50)
    assert made.memory == 16 * 100 + 8 * (16 + 2 * 64)  # eight shards of 16 tokens, and gathered keys of 64


def test_the_last_shard_has_the_longest_queries() -> None:
    speed = Speed(per_token=0.1, per_length=0.01, shortest=0.0, measured={})
    even = step("context", 2, speed=speed)
    uneven = step("context", 2, speed=speed, overhang=causal_overhang(2))
    assert causal_overhang(1) == 1
    assert even.compute == pytest.approx(256 * (0.1 + 0.64))
    assert uneven.compute == pytest.approx(256 * (0.1 + 1.5 * 0.64))


def test_a_micro_batch_is_halved_until_it_fits() -> None:
    made = step("ddp", 1, sequences=64, activations=100.0, tokens_at_once=1024)  # sixteen sequences of 6,400 bytes
    assert made.memory == 1600 + 2 * 6400
    assert step("ddp", 1, activations=1000.0).memory > CLUSTER.memory  # one sequence does not fit


def test_what_cannot_be_divided_is_none() -> None:
    common = {"sequences": 6, "T": 64, "activations": 1.0}
    assert training_step(MODEL, FLAT, CLUSTER, "ddp", n=4, **common) is None  # type: ignore[arg-type]
    assert training_step(MODEL, FLAT, CLUSTER, "context", n=3, **common) is None  # type: ignore[arg-type]
    assert training_step(MODEL, FLAT, CLUSTER, "context", n=4, **common) is not None  # type: ignore[arg-type]


def test_gpus_for_a_long_sequence() -> None:
    assert gpus_for(10.0, 0, 1000, CLUSTER) == 1
    assert gpus_for(10.0, 10_000, 1001, CLUSTER) == 2
    assert gpus_for(10.0, 0, 9000, CLUSTER) == 8
    with pytest.raises(ValueError, match="do not fit"):
        gpus_for(10.0, 20_000, 1, CLUSTER)


def test_serving() -> None:
    assert sequences_per_gpu(1000, 100, 90) == 10
    assert sequences_per_gpu(1000, 1100, 90) == 0
    assert decode_seconds(10, 100, 90, 1000) == 1.0
