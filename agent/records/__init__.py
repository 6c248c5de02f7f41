"""The data classes that all parts share: requests, samples, events, objectives, prices."""
