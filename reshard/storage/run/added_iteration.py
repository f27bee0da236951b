"""An iteration that is added to the directory of a training run."""

import os

from reshard.core.errors import ReshardError
from reshard.core.system import sync_file
from reshard.formats.torch_dist import TRACKER
from reshard.storage.io.directories import sync_directory
from reshard.storage.run.partial import PARTIAL_SUFFIX
from reshard.storage.run.workdir import Workdir


class AddedIteration(Workdir):
    """The hidden directory of an iteration in the directory of a training run, which is made where
    there is none.

    Config, tokenizer, flags and manifest are in the iteration's own directory; nothing else of the
    run is touched. The run's tracker names the iteration once it is there: at every moment it names
    one that is whole.
    """

    def check_destination(self) -> None:
        """Check the destination; first remove what saves of other iterations that were killed have left."""
        run = self.destination.parent
        if (run / ".metadata").exists() or any(run.glob("*.safetensors")):
            raise ReshardError(
                f"{run} is a checkpoint itself, to which no iteration can be added: give another directory"
            )
        for path in run.glob(f".iter_*{PARTIAL_SUFFIX}"):
            name = path.name.removeprefix(".").removesuffix(PARTIAL_SUFFIX)
            if path != self.path and name.removeprefix("iter_").isdecimal():
                Workdir(self.source, (), run / name, False, False).clean()
        super().check_destination()

    def _after_rename(self, sync: bool) -> None:
        tracker, new = self.destination.parent / TRACKER, self.path / TRACKER
        number = str(int(self.destination.name.removeprefix("iter_")))
        try:
            with open(new, "w", encoding="utf-8") as file:
                file.write(number)
                if sync:
                    file.flush()
                    sync_file(file.fileno())
            sync_directory(self.destination.parent)  # the iteration first
            os.replace(new, tracker)
        except OSError as error:
            raise ReshardError(
                f"{self.destination} is whole, but {tracker} could not be replaced ({error.strerror}): "
                f"write {number} into it"
            ) from error
