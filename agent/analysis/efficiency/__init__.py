"""How well an engine used its GPUs in a minute, by its requests, by itself and by the hardware.

`engine_observation` is what the engine's samples show, `request_activity` and `work` what its
requests needed, `minute_efficiency` the figures of a minute, `window_efficiency` those of many.
"""
