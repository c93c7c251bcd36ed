"""The figures of lesson 05 say where their figures come from, and draw what they are given."""

import pytest
import torch

from nanoqwen import kernels
from nanoqwen.attention_pictures import plot_contexts, plot_crossing, plot_pipeline, plot_slabs_and_pages, plot_walk
from nanoqwen.paged_kv import PagedKV
from nanoqwen.records import Record


def words(figure):
    """All that is written in a figure."""
    texts = [figure.get_suptitle(), *(t.get_text() for legend in figure.legends for t in legend.get_texts())]
    for axes in figure.axes:
        texts += [axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")]
        texts += [t.get_text() for t in (*axes.texts, *axes.get_yticklabels())]
    return "\n".join(texts)


def test_slabs_hold_the_longest_and_pages_what_is_needed():
    text = words(plot_slabs_and_pages((100, 17), 200))
    assert "slabs: 29 % of what is held is used" in text  # 117 of 400
    assert "pages: 81 % of what is held is used" in text  # 117 of 7 + 2 pages
    assert "(counted)" in text and "tokens' room" in text


def test_the_walk_names_whose_each_page_is():
    cache = PagedKV(1, 6, 1, 64, sequences=3)
    a = cache.new()
    cache.reserve(a, 20)
    cache.advance(a, 20)
    b = cache.fork(a)
    cache.reserve(b, 1)
    cache.advance(b, 1)
    text = words(plot_walk(cache, {"a": a, "b": b}))
    for label in ("0\na+b", "1\na", "2\nb", "3\nfree", "table of a: 20 tokens", "table of b: 21 tokens"):
        assert label in text, label
    assert "table of a" in words(plot_walk(cache, {"a": a}))


def test_no_arrow_of_the_walk_runs_through_a_box_or_a_name():
    cache = PagedKV(1, 10, 1, 64, sequences=3)
    sequences = {name: cache.new() for name in "abc"}
    for sequence, tokens in zip((*sequences.values(), *sequences.values()), (20, 30, 17, 20, 30, 1), strict=True):
        cache.reserve(sequence, tokens)  # taking turns, so that arrows lean
        cache.advance(sequence, tokens)
    (axis,) = plot_walk(cache, sequences).axes
    arrows = [sorted((text.xy[1], text.xyann[1])) for text in axis.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == sum(len(cache.pages(sequence)) for sequence in sequences.values())
    taken = [(box.get_y(), box.get_y() + box.get_height()) for box in axis.patches]
    taken += [(text.get_position()[1],) * 2 for text in axis.texts if text.get_text()]
    for low, high in arrows:  # an arrow has a strip between two rows for itself
        assert not [(bottom, top) for bottom, top in taken if bottom < high - 1e-9 and top > low + 1e-9]


def test_the_crossing_lies_where_the_bytes_are_equal():
    figure = plot_crossing({"small": (1e9, 1e5)}, limit=4096)
    (point,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert point.get_xdata() == [1e4] and point.get_ydata() == [1.0]
    assert "trained for 4,096 tokens" in words(figure)


def test_times_lie_above_those_of_the_read_probe():
    cold = {"mma": {"seconds": {"p50": 2e-6}}, "torch": {"seconds": {"p50": 5e-6}}}
    sizes = {"7B": {"contexts": {"128": {"bytes": 1e6, "cold": cold}, "512": {"bytes": 4e6, "cold": cold}}}}
    results = {"ceilings": {"read_probe": {"bytes_per_s": 4e12}}, "sizes": sizes}
    state = dict.fromkeys(("driver", "cuda", "commit", "dirty"))
    record = Record(
        "attention", "NVIDIA H200", torch="2", state={}, date="", sources={}, protocol="", results=results, **state
    )
    figure = plot_contexts(record, "7B", ["mma", "torch"])
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[2.0, 2.0], [5.0, 5.0]]
    assert "NVIDIA H200   (recorded)" in words(figure) and "µs" in words(figure)
    with pytest.raises(ValueError, match="it must begin with one of"):
        plot_contexts(record, "7B", ["mma"], label="seen")


def test_a_pipeline_without_a_gpu_is_an_order_and_no_times():
    stamps = torch.full((6, 7, 3), -1, dtype=torch.int64)
    with pytest.raises(ValueError, match="no fill was stamped"):
        plot_pipeline(stamps, on_gpu=False)
    q, pages = torch.randn(7, 64).half(), torch.randn(8, 1, 2, 16, 64).half()
    length = torch.tensor([120], dtype=torch.int32)
    kernels.paged_attention_ring(q, pages, torch.arange(8).int(), length, splits=1, timestamps=stamps)
    text = words(plot_pipeline(stamps, on_gpu=False))
    assert "simulated, order only: no times" in text and "cycles" not in text
    assert "producer" in text and "consumer 5" in text
    figure = plot_pipeline(stamps, on_gpu=True)
    assert "measured" in words(figure) and "cycles" in words(figure)
    assert figure.axes[0].get_xlim()[1] >= int((stamps[:4] - stamps[:4].min()).max())
