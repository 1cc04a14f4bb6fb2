"""Digests of ranks compared: the first tensor that differs, since when, and what differs by design."""

from __future__ import annotations

from nbguard.training.profiler.analysis.ranks import DIGEST, NONE, Feed, RankDigests, TensorName, disagreements
from nbguard.training.profiler.analysis.report import FitFinding

TENSORS = (
    TensorName(name="0.weight", kind="parameter", module="Linear"),
    TensorName(name="0.weight", kind="gradient", module="Linear"),
    TensorName(name="1.bias", kind="parameter", module="Linear"),
    TensorName(name="2.running_mean", kind="buffer", module="BatchNorm2d"),
    TensorName(name="3.table", kind="buffer", module="Table"),
)


def digests(*checks: tuple[int, str], feed: Feed = Feed(), tensors: tuple[TensorName, ...] = TENSORS) -> RankDigests:  # noqa: B008
    """Return the digests of a rank; one letter stands for that of a tensor, a dash for none."""
    written = tuple((step, "".join(NONE if letter == "-" else letter * DIGEST for letter in text)) for step, text in checks)
    return RankDigests(tensors=tensors, checks=written, feed=feed)


def findings(*ranks: RankDigests) -> list[FitFinding]:
    return list(disagreements(dict(enumerate(ranks)), len(ranks)))


def test_of_four_ranks_the_one_is_named_that_is_alone_and_since_when() -> None:
    usual, other = digests((1, "aaaaa"), (4, "bbbbb"), (8, "ccccc")), digests((1, "aaaaa"), (4, "bbebb"), (8, "eeecc"))
    (found,) = findings(usual, usual, other, usual)

    assert (found.severity, found.what) == ("problem", "The parameter `1.bias` of Linear differs between ranks")
    assert found.evidence == "rank 2 and ranks 0, 1, 3 since the optimizer's step 4; they agreed before step 1"


def test_a_gradient_and_a_buffer_are_named_as_such() -> None:
    gradient, buffer = findings(digests((1, "aaaaa")), digests((1, "abaab")))

    assert gradient.what == "The gradient of `0.weight` of Linear differs between ranks"
    assert "no_sync()" in gradient.change
    assert buffer.what == "The buffer `3.table` of Table differs between ranks"
    assert buffer.evidence == "rank 0 and rank 1 since the optimizer's step 1, the first that was compared"


def test_batch_norm_differs_by_design() -> None:
    same, design = findings(digests((1, "aaaaa")), digests((1, "aaaba")))

    assert (same.severity, same.what) == ("note", "All ranks hold the same model")
    assert (design.severity, design.what) == ("note", "`2.running_mean` of BatchNorm2d differs by design")


def test_what_has_no_value_on_a_rank_and_steps_that_only_one_has_made_are_not_compared() -> None:
    (same,) = findings(digests((1, "a-aaa"), (2, "bbbbb")), digests((1, "aaaaa"), (3, "ccccc")))

    assert same.evidence == "5 tensors compared bit by bit before step 1"


def test_another_model_is_no_comparison() -> None:
    (found,) = findings(digests((1, "aaaaa")), digests((1, "a"), tensors=TENSORS[:1]))

    assert found.what == "The ranks do not train the same model"
    assert found.evidence == "their parameters have other names: rank 0: 5 tensors; rank 1: 1 tensor"


def test_how_ranks_are_fed() -> None:
    def fed(shard: int | None, seed: int | None = 0, rate: float = 0.1) -> RankDigests:
        sampler = "" if shard is None else "DistributedSampler"
        return digests(feed=Feed(batch=8, rate=rate, sampler=sampler, seed=seed, shard=shard, shards=2))

    assert [found.what for found in findings(fed(0), fed(1))] == ["A step learns from 16 samples"]
    assert findings(fed(0), fed(0))[0].what == "Ranks read the same part of the data"
    assert findings(fed(0), fed(1, seed=3))[0].evidence == "rank 0: seed 0; rank 1: seed 3"
    assert findings(fed(0), fed(1, rate=0.2))[0].evidence == "rank 0: 0.1; rank 1: 0.2"
    assert findings(fed(None), fed(None))[0].what == "Each rank may read all of the data"


def test_one_rank_is_compared_with_none() -> None:
    assert findings(digests((1, "aaaaa"))) == []
