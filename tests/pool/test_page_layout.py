from __future__ import annotations

import numpy as np
import pytest

from strata_core.errors import SettingsError
from strata_core.pool.layout import ALIGNMENT, KV_TYPES, PageLayout


def layout(kv_type: str = "f16", page_tokens: int = 8, **fields: int) -> PageLayout:
    values = {"layers": 3, "kv_heads": 2, "head_dim": 10} | fields
    return PageLayout.attention(kv_type=kv_type, page_tokens=page_tokens, **values)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_parts_are_aligned_and_do_not_overlap(kv_type: str) -> None:
    made = layout(kv_type, value_dim=6)
    end = 0
    for parts in made.layers:
        assert [part.name for part in parts] == ["k", "v", "k_scale", "v_scale"][: 4 if kv_type == "int8" else 2]
        for part in parts:
            assert part.offset % ALIGNMENT == 0
            assert part.offset >= end
            end = part.offset + part.nbytes(made.page_tokens)
    assert end <= made.nbytes < end + ALIGNMENT
    assert made.nbytes % ALIGNMENT == 0


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_index_keys_are_the_last_part_of_one_head_and_never_narrower_than_half(kv_type: str) -> None:
    plain, made = layout(kv_type), layout(kv_type, index_dim=12)
    for parts, without in zip(made.layers, plain.layers, strict=True):
        assert [part.name for part in parts] == [*(part.name for part in without), "index"]
        assert (parts[-1].heads, parts[-1].width) == (1, 12)
        assert parts[-1].dtype == (np.float32 if kv_type == "f32" else np.float16)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_views_cover_distinct_bytes_and_write_through(kv_type: str) -> None:
    made = layout(kv_type, value_dim=6)
    pages = np.zeros((2, made.nbytes), np.uint8)
    written = 0
    for layer, parts in enumerate(made.layers):
        for number, part in enumerate(parts):
            view = made.view(pages, layer, number)
            assert view.shape == (2, part.heads, made.page_tokens, part.width)
            assert view.dtype == part.dtype
            assert not view.view(np.uint8).any()  # nothing else wrote here
            view.view(np.uint8)[:] = 1
            written += view.nbytes
    assert pages.sum() == written


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert layout().pages_for(tokens) == pages


@pytest.mark.parametrize("page_tokens", [0, 3, 12, -8])
def test_a_page_size_that_is_no_power_of_two_is_refused(page_tokens: int) -> None:
    with pytest.raises(SettingsError, match=str(page_tokens)):
        layout(page_tokens=page_tokens)


def test_an_unknown_type_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"'f8'.*int8"):
        layout("f8")
