"""The month that usage is counted in: of the calendar, in UTC."""

from datetime import UTC, datetime


def month_of(seconds: float) -> str:
    """Such as 2026-11."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m}"


def seconds_left(seconds: float) -> float:
    """Until the next month begins."""
    now = datetime.fromtimestamp(seconds, UTC)
    years, month = divmod(now.month, 12)
    return datetime(now.year + years, month + 1, 1, tzinfo=UTC).timestamp() - seconds
