"""Changes of a run of 2-byte words, in chunks of 1 MiB that are each in the smallest form of
`reshard.delta.encoding`, one after the other.

Torch's operations compare, encode and decode many chunks at once, since each takes about as long for a chunk
as for a bucket. On a GPU, refits have kernels of their own for the same bytes
(`reshard.refit.changes.kernels`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from reshard.delta.encoding import as_uint16, in_order, marked, packed_bits, unpacked_bits
from reshard.delta.forms import BLOCK, SECTION, BoxSize, Form, padded

WORD = 2
CHUNK = 1 << 19  # words
BLOCKS = CHUNK // BLOCK  # of a chunk
BITS = CHUNK // 64  # int64 of a chunk's bitmap
AT_ONCE = 1 << 23  # changes, about, of which positions are made at once: each takes some 100 bytes meanwhile
LISTED = (Form.OFFSETS, Form.BITMAP)  # forms whose values come one by one


class Comparison(NamedTuple):
    """Words as they are now, int16 ``[n]``, compared with what they were.

    `mask`, bools ``[n, rounded up to whole chunks]``, says which have other bits, and `blocks`, int32, how
    many in each block of 65,536 words.
    """

    words: torch.Tensor
    mask: torch.Tensor
    blocks: torch.Tensor

    @staticmethod
    def of(old: torch.Tensor, new: torch.Tensor) -> "Comparison":
        """Compare the words of both, int16 ``[n]`` of one device; on a GPU, enqueue it."""
        mask = torch.empty(chunks_of(len(new)) * CHUNK, dtype=torch.bool, device=new.device)
        torch.ne(old, new, out=mask[: len(new)])
        mask[len(new) :] = False
        # The sum of 128 int64 of eight marks each is eight counts, a byte each.
        eights = mask.view(torch.int64).view(-1, 128).sum(1)
        blocks = eights.view(torch.uint8).view(-1, BLOCK // 128).sum(1, dtype=torch.int32)
        return Comparison(new, mask, blocks)

    @property
    def changed(self) -> torch.Tensor:
        """The number of words that changed in each chunk."""
        return self.blocks.view(-1, BLOCKS).sum(1)


class ChunkSizes(NamedTuple):
    """The places of each chunk's changes in their payload: an element of each array for each chunk.

    `elements` are its words, of which `changed` changed; `forms` is a `Form`, and `starts` the first byte of
    each of its sections ``[chunks, 3]``; `total` are the bytes of all.
    """

    elements: np.ndarray
    changed: np.ndarray
    forms: np.ndarray
    starts: np.ndarray
    total: int

    @staticmethod
    def of(words: int, changed: np.ndarray, forms: np.ndarray | None = None) -> "ChunkSizes":
        """Return those of a run of so many words, in these forms, by default the smallest."""
        elements = np.minimum(CHUNK, words - CHUNK * np.arange(chunks_of(words)))
        boxes = BoxSize(elements, WORD, changed)
        sizes = np.stack([np.zeros_like(elements), *(boxes.size(form) for form in Form if form)])
        if forms is None:
            forms = np.where(changed > 0, 1 + sizes[1:].argmin(0), int(Form.NOTHING))
        ends = sizes[forms, np.arange(len(forms))].cumsum()
        first = ends - sizes[forms, np.arange(len(forms))]
        second = first + padded(changed * WORD)
        third = second + padded(4 * -(-elements // BLOCK))
        total = int(ends[-1]) if len(ends) else 0
        return ChunkSizes(elements, changed, forms, np.stack([first, second, third], 1), total)

    def groups(self) -> Iterator[np.ndarray]:
        """Yield the numbers of the chunks with changes, of as many at a time as are worked on at once."""
        work = np.where(self.forms == Form.PLAIN, self.elements, self.changed)
        numbers = np.flatnonzero(work)
        group = (work[numbers].cumsum() - work[numbers]) // AT_ONCE
        yield from np.split(numbers, np.flatnonzero(np.diff(group)) + 1) if len(numbers) else ()

    def of_form(self, chunks: np.ndarray, form: Form) -> np.ndarray:
        """Return those of these chunks that are in a form."""
        return chunks[self.forms[chunks] == form]


class Words(NamedTuple):
    """Changed words: their int64 `positions` ``[n]`` in the run, and their `values`, int16 ``[n]``."""

    positions: torch.Tensor
    values: torch.Tensor


def chunks_of(words: int) -> int:
    """Return the number of chunks of so many words."""
    return -(-words // CHUNK)


def encode_chunks(compared: Comparison, sizes: ChunkSizes, payload: torch.Tensor) -> None:
    """Write the changes of all chunks into `payload`, zeros in uint8 ``[sizes.total]``."""
    for chunks in sizes.groups():
        plain = sizes.of_form(chunks, Form.PLAIN)
        for run in _runs(plain):
            words = compared.words[run[0] * CHUNK : (run[-1] + 1) * CHUNK].view(torch.uint8)
            start = int(sizes.starts[run[0], 0])
            payload[start : start + len(words)] = words
        if len(plain) < len(chunks):
            _encode_listed(compared, sizes, chunks, payload)


def _encode_listed(
    compared: Comparison, sizes: ChunkSizes, chunks: np.ndarray, payload: torch.Tensor
) -> None:
    """Write the changes of those of these chunks, a group, in which they are listed."""
    begin, end = int(chunks[0]), int(chunks[-1]) + 1
    device, span = payload.device, np.arange(begin, end)
    is_listed = np.isin(sizes.forms[span], LISTED)
    listed, changed = span[is_listed], np.where(is_listed, sizes.changed[span], 0)
    mask, words = compared.mask[begin * CHUNK : end * CHUNK], compared.words[begin * CHUNK : end * CHUNK]
    if len(sizes.of_form(chunks, Form.PLAIN)):
        mask = (mask.view(-1, CHUNK) & torch.from_numpy(is_listed).to(device)[:, None]).view(-1)
    positions = marked(mask, int(changed.sum()))
    before = changed.cumsum() - changed  # changes in the chunks of the group ahead of each
    # Values and offsets have 2 bytes: where those of a chunk begin, less the changes ahead.
    firsts = sizes.starts[span][:, [0, 2]] // WORD - before[:, None]
    counted = sizes.of_form(listed, Form.OFFSETS)
    blocks = -(-sizes.elements[counted] // BLOCK)
    to_values, to_offsets, forms, to_counts, from_counts = _on_device(
        *firsts.T,
        sizes.forms[span],
        _spans(sizes.starts[counted, 1] // 4, blocks),
        _spans(counted * BLOCKS, blocks),
        device=device,
    )
    order, chunk = torch.arange(len(positions), device=device), positions // CHUNK
    payload.view(torch.int16)[order + to_values[chunk]] = words[positions]
    payload.view(torch.int32)[to_counts] = compared.blocks[from_counts]
    if len(counted):
        by_offset = forms[chunk] == int(Form.OFFSETS)
        which = order if len(counted) == len(listed) else by_offset.nonzero()[:, 0]
        payload.view(torch.int16)[which + to_offsets[chunk[which]]] = as_uint16(positions[which] % BLOCK)
    of_form = sizes.of_form(listed, Form.BITMAP)
    if len(of_form):
        lengths = padded(-(-sizes.elements[of_form] // 8)) // SECTION
        to_bits = _spans_on_device(sizes.starts[of_form, 1] // SECTION, lengths, device)
        from_bits = _spans_on_device((of_form - begin) * BITS, lengths, device)
        payload.view(torch.int64)[to_bits] = packed_bits(mask).view(torch.int64)[from_bits]


def decode_chunks(payload: torch.Tensor, sizes: ChunkSizes) -> Iterator[list[Words] | None]:
    """Yield the changes of groups of chunks; None if positions are outside of their chunks, or their counts
    are wrong. Then nothing may be written from them."""
    for chunks in sizes.groups():
        decoded, valid = [], []
        for form in LISTED:
            of_form = sizes.of_form(chunks, form)
            if not len(of_form):
                continue
            changes = {Form.OFFSETS: _offsets, Form.BITMAP: _bitmaps}[form](payload, sizes, of_form)
            if changes is None:
                yield None
                return
            words, is_valid = changes
            decoded.append(words)
            end = int(of_form[-1]) * CHUNK + int(sizes.elements[of_form[-1]])
            valid.append(is_valid & in_order(words.positions, end))
        plain = sizes.of_form(chunks, Form.PLAIN)
        for run in _runs(plain):
            first, start, count = run[0] * CHUNK, sizes.starts[run[0], 0] // WORD, sizes.elements[run].sum()
            positions = torch.arange(first, first + count, device=payload.device)
            decoded.append(Words(positions, payload.view(torch.int16)[start : start + count]))
        yield decoded if not valid or bool(torch.stack(valid).all()) else None


# Changes, and whether all is as it should be; None where it is not.
ListedWords = tuple[Words, torch.Tensor] | None


def _offsets(payload: torch.Tensor, sizes: ChunkSizes, chunks: np.ndarray) -> ListedWords:
    """Return the changes of chunks of this form, and whether their blocks have as many as the chunks."""
    changed, starts, blocks = sizes.changed[chunks], sizes.starts[chunks], -(-sizes.elements[chunks] // BLOCK)
    before = changed.cumsum() - changed
    repeats, to_values, to_offsets, last, ends_of_chunks, to_counts, first_of_block = _on_device(
        changed,
        starts[:, 0] // WORD - before,
        starts[:, 2] // WORD - before,
        blocks.cumsum() - 1,
        before + changed,
        _spans(starts[:, 1] // 4, blocks),
        _spans(chunks * CHUNK, blocks, BLOCK),
        device=payload.device,
    )
    total, words = int(changed.sum()), payload.view(torch.int16)
    which = torch.repeat_interleave(
        torch.arange(len(chunks), device=payload.device), repeats, output_size=total
    )
    order = torch.arange(total, device=payload.device)
    counts = payload.view(torch.int32)[to_counts].to(torch.int64)
    ends = counts.cumsum(0)
    # The block of each change: the first that ends after it. No count can make this read elsewhere.
    block = torch.searchsorted(ends, order, right=True).clamp_(max=len(ends) - 1)
    positions = first_of_block[block] + (words[order + to_offsets[which]].to(torch.int64) & (BLOCK - 1))
    valid = (counts >= 0).all() & (ends[last] == ends_of_chunks).all()
    return Words(positions, words[order + to_values[which]]), valid


def _bitmaps(payload: torch.Tensor, sizes: ChunkSizes, chunks: np.ndarray) -> ListedWords:
    """Return the changes of chunks of this form, and whether each chunk marks as many as it has."""
    device, changed, starts = payload.device, sizes.changed[chunks], sizes.starts[chunks]
    lengths = padded(-(-sizes.elements[chunks] // 8)) // SECTION
    bits = payload.view(torch.int64)[_spans_on_device(starts[:, 1] // SECTION, lengths, device)]
    marks = unpacked_bits(bits.view(torch.uint8)).nonzero()[:, 0]
    if len(marks) != changed.sum():
        return None
    # All chunks but the last of a run are whole.
    which = marks // CHUNK
    [first] = _on_device(chunks * CHUNK, device=device)
    expected = _spans_on_device(np.arange(len(chunks)), changed, device, 0)
    values = payload.view(torch.int16)[_spans_on_device(starts[:, 0] // WORD, changed, device)]
    return Words(first[which] + marks % CHUNK, values), (which == expected).all()


def _runs(chunks: np.ndarray) -> list[np.ndarray]:
    """Return these chunks in runs that follow one another; whole chunks lie so in a payload, too."""
    return np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1) if len(chunks) else []


def _on_device(*arrays: np.ndarray, device: torch.device) -> Sequence[torch.Tensor]:
    """Return arrays as int64 on a device, carried there at once."""
    whole = torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)
    return whole.split([len(array) for array in arrays])


def _spans(starts: np.ndarray, lengths: np.ndarray, step: int = 1) -> np.ndarray:
    """Return the numbers of each span in turn ``[lengths.sum()]``: its start, and so on by `step`."""
    numbers: np.ndarray = np.repeat(starts - step * (lengths.cumsum() - lengths), lengths)
    return numbers + step * np.arange(len(numbers))


def _spans_on_device(
    starts: np.ndarray, lengths: np.ndarray, device: torch.device, step: int = 1
) -> torch.Tensor:
    """Return the same on a device, made there."""
    total, before = int(lengths.sum()), lengths.cumsum() - lengths
    first, repeats = _on_device(starts - step * before, lengths, device=device)
    numbers = torch.repeat_interleave(first, repeats, output_size=total)
    return numbers + step * torch.arange(total, device=device)
