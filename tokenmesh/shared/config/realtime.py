"""RealtimeSettings: the websocket sessions of a gateway."""

from pydantic import BaseModel, Field


class RealtimeSettings(BaseModel):
    """A part of GatewaySettings. Times are seconds, sizes bytes."""

    realtime_max_sessions: int = Field(
        default=1024, ge=0, description="Realtime sessions of one gateway at a time; 0: none."
    )
    realtime_max_items: int = Field(
        default=1024, ge=1, description="Items of one realtime session's conversation."
    )
    realtime_max_session_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=1024,
        description="Size of all items of a realtime session's conversation as JSON.",
    )
    realtime_max_message_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1024, description="Largest event that a realtime client sends."
    )
    realtime_idle_timeout_s: float = Field(
        default=900.0, gt=0, description="A realtime session without an event or response ends."
    )
    realtime_session_timeout_s: float = Field(
        default=3600.0, gt=0, description="Bound of a realtime session from its beginning."
    )
    realtime_ping_interval_s: float = Field(
        default=20.0, gt=0, description="How often a realtime client is pinged."
    )
    realtime_ping_timeout_s: float = Field(
        default=20.0, gt=0, description="A realtime client that does not answer a ping is gone."
    )
