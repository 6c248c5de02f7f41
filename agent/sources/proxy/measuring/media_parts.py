"""Counts the media in the messages of a request: images, audio and video, and their bytes."""

from typing import Any, NamedTuple

import msgspec

# Each object of the messages is built once, in about 100 bytes.
MAX_OBJECTS = 50_000
_LONGEST_TYPE = 200


class MediaParts(NamedTuple):
    """The media of a request. `bytes_` are those that the request itself holds, decoded."""

    parts: int
    bytes_: int


NO_MEDIA = MediaParts(0, 0)


class _MediaFields(msgspec.Struct, gc=False):
    """The fields that hold the messages of a request."""

    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _MessageContent(msgspec.Struct, gc=False):
    content: msgspec.Raw = msgspec.Raw()


class _ContentPart(msgspec.Struct, gc=False):
    """A part of a message's content, in the words of OpenAI, vLLM and Anthropic."""

    type: Any = None
    image_url: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()
    audio_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()


class _MediaSource(msgspec.Struct, gc=False):
    url: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()


# The type of a part, and the key of its media.
_MEDIA = {
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "image": "source",
}
_TYPE = b'"type"'
_BODY = msgspec.json.Decoder(_MediaFields)
_MESSAGES = msgspec.json.Decoder(list[_MessageContent])
_PARTS = msgspec.json.Decoder(list[_ContentPart])
_SOURCE = msgspec.json.Decoder(_MediaSource)


class DeferredMedia:
    """The media of a request, read once: after it was sent, because it must not wait for that."""

    __slots__ = ("_found", "_unread")

    def __init__(self, body: bytes | None) -> None:
        self._unread = body
        self._found: MediaParts | None = None

    def read(self) -> MediaParts | None:
        """Return the media, and keep the body no longer; None if they cannot be read."""
        body, self._unread = self._unread, None
        if body is not None:
            self._found = media_in(body)
        return self._found


def media_in(body: bytes) -> MediaParts | None:
    """Return the media in the messages of a body; None if they cannot be read.

    Nothing is built of texts and media, which may be long.
    """
    # Each part names its type, and plain chats have no parts.
    if _TYPE not in body:
        return NO_MEDIA
    if body.count(b"{") > MAX_OBJECTS:
        return None
    try:
        found = _BODY.decode(body)
        messages = found.messages or found.input
        # `/v1/responses` takes a plain text, too.
        parts = _parts_of(messages) if _begins(messages, b"[") else []
        return MediaParts(len(parts), sum(map(_bytes_of, parts)))
    except (ValueError, RecursionError):
        return None


def _parts_of(messages: msgspec.Raw) -> list[msgspec.Raw]:
    """The media of each part that is one."""
    return [
        getattr(part, _MEDIA[part.type])
        for message in _MESSAGES.decode(messages)
        if _begins(message.content, b"[")
        for part in _PARTS.decode(message.content)
        if isinstance(part.type, str) and part.type in _MEDIA
    ]


def _begins(text: msgspec.Raw, with_: bytes) -> bool:
    return bytes(memoryview(text)[: len(with_)]) == with_


def _bytes_of(media: msgspec.Raw) -> int:
    """The bytes of a `data:` URL or of base64 data; 0 of any other URL."""
    text = memoryview(media)
    if _begins(media, b"{"):
        source = _SOURCE.decode(media)
        if source.data:
            return _decoded_length(memoryview(source.data)[1:-1])
        text = memoryview(source.url)
    if bytes(text[:6]) != b'"data:':
        return 0
    head, comma, _ = bytes(text[:_LONGEST_TYPE]).partition(b",")
    if not comma:
        return 0
    data = text[len(head) + 1 : -1]
    return _decoded_length(data) if head.endswith(b";base64") else len(data)


def _decoded_length(base64: memoryview) -> int:
    """The bytes behind base64, padded or not, in a JSON text that may write `/` as `\\/`."""
    escapes = bytes(base64).count(b"\\")
    return (len(base64) - escapes - bytes(base64[-2:]).count(b"=")) * 3 // 4
