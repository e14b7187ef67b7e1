"""The count of a step's bytes, against counts that are easily made by hand."""

from benchmarks import step_bytes


def test_the_head_by_hand() -> None:
    moved, multiplied = step_bytes.parts(512, 2048, 64, labels=512, precision="bf16")["head"]
    labels = 512 * 512
    logits = labels * 8192 * 2  # bytes
    # Written, read and overwritten by the loss, read by two products; and the features, read and written twice.
    assert moved == 5 * logits + 4 * labels * 64 * 4
    assert multiplied == 3 * 2 * labels * 8192 * 64


def test_what_is_not_the_stream_is_half_as_much_in_half_precision() -> None:
    full, half = (step_bytes.parts(8, 256, 64, labels=64, precision=name) for name in ("fp32", "bf16"))
    for name in ("projections", "norms of q and k", "short convolution and its gate"):
        assert full[name][0] == 2 * half[name][0]
    mixed = step_bytes.parts(8, 256, 64, labels=64, precision="tf32")
    assert {name: counted for name, counted in mixed.items() if name != "head"} | {"head": full["head"]} == full
    assert mixed["head"] == half["head"]
    assert full["embedding, positions, dropout"] == half["embedding, positions, dropout"]
