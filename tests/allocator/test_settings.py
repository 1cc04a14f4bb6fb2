"""Settings strings: what PyTorch makes of them, and what nbguard says of those that it would refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.errors import SettingsError
from nbguard.memory.allocator.model.settings import AllocatorSettings, parse_version, round_size, segment_size, tie_break

MIB = 1024**2


def test_every_modelled_key() -> None:
    found = AllocatorSettings.parse(
        "expandable_segments:True, max_split_size_mb:64,max_non_split_rounding_mb:32,garbage_collection_threshold:0.4,"
        "large_segment_size_mb:30,per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True,backend:native,"
        "roundup_power2_divisions:[16:2,64:4,>:8],pinned_num_register_threads:8"
    )

    assert found == AllocatorSettings(
        max_split_size=64 * MIB,
        max_non_split_rounding=32 * MIB,
        divisions=(2, 2, 2, 2, 2, 0, 4, *[8] * 9),
        gc_threshold=0.4,
        expandable=True,
        large_segment=30 * MIB,
        fraction=0.5,
        throw_on_oom=True,
        others=(("pinned_num_register_threads", "8"),),
    )


def test_more_than_starts_at_the_last_key_before_2_10() -> None:
    conf = "roundup_power2_divisions:[256:1,512:2,>:8]"

    assert AllocatorSettings.parse(conf, (2, 9)).divisions == (*[1] * 9, *[8] * 7)
    assert AllocatorSettings.parse(conf, (2, 10)).divisions == (*[1] * 9, 2, *[8] * 6)


@pytest.mark.parametrize(
    ("conf", "key"),
    [
        ("expandable_segment:True", "expandable_segment:"),
        ("expandable_segments:true", "expandable_segments:"),
        ("expandable_segments:[a:b]", "expandable_segments:"),
        ("max_split_size_mb:19", "max_split_size_mb:"),
        ("max_split_size_mb:-1", "max_split_size_mb:"),
        ("max_split_size_mb:99999999999999999999", "max_split_size_mb:"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "max_split_size_mb:"),
        ("large_segment_size_mb:10", "large_segment_size_mb:"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold:"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold:"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions:"),
        ("roundup_power2_divisions:[100:4]", "roundup_power2_divisions:"),
        ("roundup_power2_divisions:[256:4,512]", "roundup_power2_divisions:"),
        ("roundup_power2_divisions:[]", "roundup_power2_divisions:"),
        ("backend:cudaMallocAsync", "backend:"),
        ("max_split_size_mb", "max_split_size_mb"),
        ("max_split_size_mb:64;expandable_segments:True", "max_split_size_mb"),
        (":" * 9000, "allocator settings:"),
    ],
)
def test_nonsense_is_refused_with_its_key(conf: str, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        AllocatorSettings.parse(conf)

    assert str(caught.value).startswith(key)
    assert len(str(caught.value)) < 400


def test_a_key_that_this_version_does_not_know() -> None:
    with pytest.raises(SettingsError, match=r"large_segment_size_mb: known to PyTorch since 2\.11, and this is 2\.10"):
        AllocatorSettings.parse("large_segment_size_mb:64", (2, 10))


def test_a_later_call_resets_some_and_keeps_the_rest() -> None:
    first = AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:64,large_segment_size_mb:30")

    assert first.updated("garbage_collection_threshold:0.5").conf() == (
        "expandable_segments:True,large_segment_size_mb:30,garbage_collection_threshold:0.5"
    )


@given(
    st.builds(
        AllocatorSettings,
        max_split_size=st.none() | st.integers(64, 10**6).map(lambda n: n * MIB),
        max_non_split_rounding=st.none() | st.integers(64, 10**6).map(lambda n: n * MIB),
        divisions=st.tuples(*[st.sampled_from([0, 1, 2, 4, 64])] * 16),
        gc_threshold=st.just(0.0) | st.floats(0.01, 0.99),
        expandable=st.booleans(),
        large_segment=st.integers(11, 64).map(lambda n: n * MIB),
        fraction=st.none() | st.floats(0.01, 1),
        throw_on_oom=st.booleans(),
    )
)
def test_what_is_printed_reads_the_same(settings: AllocatorSettings) -> None:
    assert AllocatorSettings.parse(settings.conf()) == settings


def test_sizes() -> None:
    quarter = (4,) * 16

    assert [round_size(n) for n in (1, 512, 513, MIB + 1)] == [512, 512, 1024, MIB + 512]
    assert [round_size(n, quarter) for n in (513, 2049, 1200 * 1024, MIB)] == [1024, 2560, 1280 * 1024, MIB]
    assert round_size(2**40, (0,) * 15 + (2,)) == 2**40
    assert [segment_size(n) for n in (MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 21 * MIB)] == [
        *(2 * MIB, 20 * MIB, 20 * MIB, 10 * MIB, 22 * MIB),
    ]


@given(st.integers(1, 2**45), st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64, 128, 512, 2**20]))
def test_rounding_is_upwards_to_multiples_of_512_and_stable(size: int, divisions: int) -> None:
    rounded = round_size(size, (divisions,) * 16)

    assert rounded >= size
    assert rounded % 512 == 0
    assert round_size(rounded, (divisions,) * 16) == rounded


def test_versions() -> None:
    found = [tie_break(parse_version(text)) for text in ("2.9.1", "2.11.0+cu128", "2.12.1", "2.13.0", "3.0a0")]

    assert found == ["address", "address", "block", "segment", "segment"]
    with pytest.raises(ValueError, match="write it as"):
        parse_version("newest")
