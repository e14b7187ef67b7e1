"""The cost model of many GPUs against sums made by hand."""

import pytest
from benchmarks.scaling import (
    Cluster,
    Model,
    Speed,
    Step,
    decode_seconds,
    fit_speed,
    ring_seconds,
    sent_bytes,
    sequences_per_gpu,
    training_step,
)

CLUSTER = Cluster(node=4, within=100.0, between=10.0, reached=0.5, latency=0.0, memory=20_000, bandwidth=1000.0)
MODEL = Model(blocks=80, root=20, layers=3)
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
    assert sent_bytes(MODEL, "ddp", 1) == {}
    # Two processes: half of 400 bytes is sent to be summed, and half of the sums.
    assert sent_bytes(MODEL, "ddp", 2) == {"gradients": 400}
    # Per micro batch a process sends its half of the blocks twice and of the root once: 160 + 160 + 40.
    assert sent_bytes(MODEL, "fsdp", 2, micro_batches=3) == {"weights": 3 * 360, "gradients": 200}


def test_links_by_hand() -> None:
    assert ring_seconds(1000, 1, CLUSTER) == 0
    assert ring_seconds(1000, 4, CLUSTER) == 1000 / 50  # half of the stated speed is reached
    assert ring_seconds(1000, 8, CLUSTER) == 1000 / 20  # four adapters of 10
    assert ring_seconds(0, 8, CLUSTER._replace(latency=3.0)) == 9


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


def test_a_micro_batch_is_halved_until_it_fits() -> None:
    made = step("ddp", 1, sequences=64, activations=100.0, tokens_at_once=1024)  # sixteen sequences of 6,400 bytes
    assert made.memory == 1600 + 2 * 6400
    assert step("ddp", 1, activations=1000.0).memory > CLUSTER.memory  # one sequence does not fit


def test_what_cannot_be_divided_is_none() -> None:
    common = {"sequences": 6, "T": 64, "activations": 1.0}
    assert training_step(MODEL, FLAT, CLUSTER, "ddp", n=4, **common) is None  # type: ignore[arg-type]
    assert training_step(MODEL, FLAT, CLUSTER, "ddp", n=3, **common) is not None  # type: ignore[arg-type]


def test_serving() -> None:
    assert sequences_per_gpu(1000, 100, 90) == 10
    assert sequences_per_gpu(1000, 1100, 90) == 0
    assert decode_seconds(10, 100, 90, 1000) == 1.0
