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


class _Message(msgspec.Struct, gc=False):
    content: msgspec.Raw = msgspec.Raw()


class _Part(msgspec.Struct, gc=False):
    """A part of a message's content, in the words of OpenAI, vLLM and Anthropic."""

    type: Any = None
    image_url: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()
    audio_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()


class _Source(msgspec.Struct, gc=False):
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
_MESSAGES = msgspec.json.Decoder(list[_Message])
_PARTS = msgspec.json.Decoder(list[_Part])
_SOURCE = msgspec.json.Decoder(_Source)


def media_parts(body: bytes, messages: msgspec.Raw) -> MediaParts | None:
    """Return the media in the messages of a body; None if they cannot be read.

    Nothing is built of texts and media, which may be long.
    """
    if not _begins(messages, b"["):
        # `/v1/responses` takes a plain text, too; a request without messages has no media.
        return NO_MEDIA
    if body.count(b"{") > MAX_OBJECTS:
        return None
    parts = size = 0
    try:
        for message in _MESSAGES.decode(messages):
            if not _begins(message.content, b"["):
                continue
            for part in _PARTS.decode(message.content):
                key = _MEDIA.get(part.type) if isinstance(part.type, str) else None
                if key is not None:
                    parts += 1
                    size += _bytes_of(getattr(part, key))
    except ValueError:
        return None
    return MediaParts(parts, size)


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
