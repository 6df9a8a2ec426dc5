"""What training does to the drives: bytes written, as part of what their makers rate them for.

A drive is rated by the terabytes that may be written in its life (TBW), or by drive writes per day
over the warranty: TBW = capacity x DWPD x days. State on NVMe is rewritten in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from swap.tiers import format_bytes, parse_bytes

DRIVE_ENDURANCE = "600TB"
"""Rating that is assumed of each drive unless told: usual for a consumer SSD of 1 TB. Larger drives
have proportionally more; drives for data centres with one write a day for five years three times
as much.
"""
_SECONDS_PER_DAY = 86400


def endurance_of(drive_endurance: int | str, num_drives: int) -> int:
    """Bytes that all drives together are rated for. Raises ``ValueError``, ``TypeError``."""
    return parse_bytes(drive_endurance, name="drive_endurance") * num_drives


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """Bytes that a step writes to drives that are rated for ``endurance_bytes`` together.

    ``seconds_per_step`` is None where nothing is known about it.
    """

    written_bytes_per_step: int
    seconds_per_step: float | None
    endurance_bytes: int

    @property
    def written_bytes_per_day(self) -> float | None:
        """If steps follow each other all day long."""
        if not self.seconds_per_step:
            return None
        return self.written_bytes_per_step * _SECONDS_PER_DAY / self.seconds_per_step

    @property
    def share_per_day(self) -> float | None:
        """Part of the rated endurance that a day takes."""
        per_day = self.written_bytes_per_day
        return None if per_day is None else per_day / self.endurance_bytes

    @property
    def steps(self) -> float:
        """Steps until the rating is reached; maybe infinite."""
        written = self.written_bytes_per_step
        return self.endurance_bytes / written if written else float("inf")

    def rows(self) -> list[tuple[str, str]]:
        """Lines of a table."""
        per_day, share = self.written_bytes_per_day, self.share_per_day
        rating = f"{self.endurance_bytes / 1e12:,.0f} TB"
        rows = [("steps within the drives' rating", f"{self.steps:,.0f} ({rating} written)")]
        if per_day is not None and share is not None:
            text = f"{format_bytes(per_day)}, {share:.2%} of the rating"
            rows.append(("written per day", text))
        return rows
