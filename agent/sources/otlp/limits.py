"""What one export may hold and what all exports may take together; `docs/otlp.md` explains it.

The agent lives in 512 MiB and takes 140 of them at rest. What is below takes 250 MiB at most.
"""

KIB = 1024
MIB = 1024 * KIB

# One body, as it comes and after decompression: gRPC's own default. gRPC does not say how long a
# message is before all of it is in memory, and for a moment has it three times.
MAX_BODY_BYTES = 4 * MIB
MAX_GRPC_READING = 4
# Calls that wait to be read: gRPC holds up to 64 KiB of each. One more refuses the oldest.
MAX_GRPC_WAITING = 256
# Connections whose last message stalled, which wait behind the others.
MAX_STALLED_KNOWN = 1024

# Python's parser of JSON cannot be interrupted: it takes 0.3 s at most for so many values, and
# 77 MB.
MAX_JSON_VALUES = 550_000
# Two bytes can encode an empty span, which takes 168 bytes in memory.
MAX_PARSED_BYTES = 64 * MIB

# A body up to this size is parsed in the event loop, others one by one in a thread.
SMALL_PROTOBUF_BYTES = 512 * KIB
# A body with more bytes that can begin a span is not parsed there: 1,500 spans of vLLM have them.
SMALL_SPAN_TAGS = 32_768
# So many records are stored at a time, and those of other senders come between.
BATCH_SPANS = 2048
# About the memory of a record that waits to be stored: the most that 4 MiB hold must have room.
RECORD_BYTES = 512

# All bodies in hand, plain and compressed, of both doors. Large ones leave a part to those of a
# usual size: vLLM sends 512 spans, which are 0.25 MiB.
MAX_BYTES_HELD = 64 * MIB
KEPT_FOR_SMALL_BYTES = 16 * MIB
SMALL_BYTES = 1 * MIB

# A sender gives way to others when its body has not grown for so long by a sixteenth and 64 KiB,
# or its message over gRPC is not complete.
PATIENCE_S = 1.0
PROGRESS_BYTES = 64 * KIB
# The longest time for a body to arrive when no other sender waits. vLLM's exporter gives up after
# 10 s.
HTTP_BODY_WITHIN_S = 30.0
GRPC_BODY_WITHIN_S = 10.0
# No sender waits longer for an answer, so storing the rest of a body is of no use.
STORED_WITHIN_S = 60.0
