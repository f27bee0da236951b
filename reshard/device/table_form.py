"""Boxes of tensors that transformers saves otherwise than a table has them, as boxes of the table's tensors: gpt-oss'
experts, of which a file has gate and up in turn, and transposed."""

from collections.abc import Iterator

from reshard.core.boxes import Box
from reshard.core.views import View, strided_parts, tensor_shapes, views_by_tensor
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region
from reshard.megatron.parameters import expand
from reshard.models.model import Model
from reshard.storage.io.boxes import Rows


class TableForm:
    """Which tensors of a `model`'s table are views of stored ones, by the stored one's name."""

    def __init__(self, model: Model) -> None:
        mapping = expand(model)
        self._names = {view: name for name, view in mapping.packed.items()}
        self._views = views_by_tensor(self._names)
        self._stored = tensor_shapes({view: mapping.shapes[name] for view, name in self._names.items()})

    def boxes(self, live: LiveBox) -> Iterator[LiveBox]:
        """Yield the boxes of the table's tensors that lie in a box of a stored one, or of one index of its first dim,
        where they lie; the box itself, if it is of another tensor."""
        view = View.parse(live.name)
        if view.tensor not in self._views:
            yield live
            return
        shape, (offsets, lengths), region = self._stored[view.tensor], live.box, live.region
        dims = iter(zip(offsets, lengths, (region.pitch, live.step), strict=False))
        runs = [(s.start, 1, 0) if s.drops else next(dims) for s in view.by_dim(len(shape))]
        firsts, counts, strides = zip(*runs, strict=True)
        begin = region.offset + live.local.start * region.pitch + live.local.column * live.step
        for name in self._views[view.tensor]:
            for part in strided_parts(name, shape, Box(firsts, counts), strides):
                pitch, step = (*part.strides, 1)[:2]
                rows, columns = (*part.box.lengths, 1)[:2]
                yield live._replace(
                    name=self._names[name],
                    box=part.box,
                    region=Region(region.tensor, begin + part.offset, pitch),
                    local=Rows(0, rows, 0, columns),
                    step=step,
                )
