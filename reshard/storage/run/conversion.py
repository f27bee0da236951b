"""One way through a conversion: meet, create the files, stream every tensor, sync, read again what
an earlier run had written, and publish."""

from dataclasses import dataclass, field
from typing import Any

from reshard.core.errors import ReshardError, is_resumable
from reshard.storage.io.files import OpenFiles
from reshard.storage.run.job import ConversionJob
from reshard.storage.run.share import Share, ShareResult
from reshard.storage.run.workdir import fingerprint


@dataclass
class Outcome:
    """The outcome of a conversion: how many tensors an earlier run had finished, how many values of each
    tensor a cast made infinite, and whether an earlier run had published everything."""

    resumed_tensors: int = 0
    overflowed: dict[str, int] = field(default_factory=dict)
    was_published: bool = False


def run_conversion(job: ConversionJob, settings: dict[str, Any]) -> Outcome:
    """Write everything and publish it. `settings` is all but the source that decides the bytes: a
    run is resumed only with the same.

    Raises ReshardError. What can be resumed is left for that, all else is removed.
    """
    return _Run(job).run(settings)


class _Run:
    def __init__(self, job: ConversionJob) -> None:
        self.job = job
        self.slow_files: dict[str, bytes] | None = None

    def run(self, settings: dict[str, Any]) -> Outcome:
        job, team = self.job, self.job.team
        contents, inodes = job.source.identity()
        # Hosts know the same file under different inodes, so only the first process compares those.
        run_fingerprint = fingerprint(contents, settings, team.size)
        files, published, unusable = OpenFiles.of_destination(write=True), False, False
        try:
            if len(set(team.exchange(run_fingerprint))) > 1:
                raise ReshardError(
                    "the processes of this run were given different sources, layouts or options",
                    resumable=True,
                )
            if any(team.together(lambda: self._open_workdir(fingerprint(run_fingerprint, inodes)))):
                published = True
                return Outcome(len(job.tensors), was_published=True)
            results, resumed = self._write_all(files)
            checksums = {
                stored_name: checksum
                for result in results
                for stored_name, checksum in result.checksums.items()
            }
            team.conclude(lambda: self._publish(checksums))
            published = True
            overflowed = {
                stored_name: count for result in results for stored_name, count in result.overflowed.items()
            }
            return Outcome(len(resumed), overflowed)
        except BaseException as error:
            # An interrupt or a kill leaves the directory for --resume; what cannot be resumed goes
            # away.
            unusable = not is_resumable(error)
            team.fail(error)
            raise
        finally:
            files.close()
            if not published:
                team.stop()  # before another run can take the lock
            job.workdir.close(remove=unusable)

    def _open_workdir(self, recorded: str) -> bool:
        """Prepare the working directory; return True where an interrupted run of the same had
        published all before."""
        job = self.job
        if job.team.process:
            return False
        needed, free = job.workdir.space(job.destination.sizes)
        if needed > free:
            raise ReshardError(
                f"{job.workdir.destination} needs {needed:,} more bytes, but the disk has {free:,} free",
                resumable=True,
            )
        return job.workdir.open(recorded, job.options.resume)

    def _write_all(self, files: OpenFiles) -> tuple[list[ShareResult], set[str]]:
        """Write the shares of all processes; return the results of all, and the tensors of this
        process's share that were done before."""
        team = self.job.team
        results = self._write_shares(files)
        resumed = set(results[team.process].resumed)
        changed = self._changed_tensors(results)
        if changed:
            results = self._write_shares(files, changed)
            resumed &= set(results[team.process].resumed)
        return results, resumed

    def _write_shares(self, files: OpenFiles, to_rewrite: frozenset[str] = frozenset()) -> list[ShareResult]:
        share = Share(self.job, self.slow_files)
        answers = self.job.team.together(lambda: share.write(files, to_rewrite))
        self.slow_files = share.slow_files
        return [ShareResult(*answer) for answer in answers]

    def _changed_tensors(self, results: list[ShareResult]) -> frozenset[str]:
        """Return the stored tensors of an earlier run whose bytes are no longer those that it
        wrote. Each is read again by one process."""
        resumed = {
            stored_name
            for result in results
            for name in result.resumed
            for stored_name in self.job.quantized.stored_names(name)
        }
        if not resumed:
            return frozenset()
        checksums = {
            stored_name: checksum for result in results for stored_name, checksum in result.checksums.items()
        }
        answers = self.job.team.together(lambda: Share(self.job).changed_tensors(resumed, checksums))
        return frozenset(stored_name for stored_names in answers for stored_name in stored_names)

    def _publish(self, checksums: dict[str, str]) -> None:
        job = self.job
        with job.source.unchanged():
            self._check_copies(checksums)
            job.destination.finish(
                job.workdir, job.manifest_fields(), checksums, job.options.sync, self.slow_files
            )
        job.workdir.publish(job.options.sync)

    def _check_copies(self, checksums: dict[str, str]) -> None:
        """Raise ReshardError if tensors that Megatron holds as one parameter differ."""
        job = self.job
        for copy, primary in {**job.source.copies, **job.destination.copies}.items():
            copy_checksums, primary_checksums = (
                [checksums[stored_name] for stored_name in job.quantized.stored_names(name)]
                for name in (copy, primary)
            )
            if copy_checksums != primary_checksums:
                hint = (
                    ': if they are two, say "tie_word_embeddings": false in config.json'
                    * job.source.model.tied
                )
                raise ReshardError(
                    f"{job.source.path}: {copy} differs from {primary}, but Megatron holds "
                    f"the two as one parameter{hint}"
                )
