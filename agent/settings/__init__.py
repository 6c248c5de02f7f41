"""The settings: defaults, then a YAML file, then environment variables."""

from agent.settings.engine_settings import EngineSettings
from agent.settings.loading import load
from agent.settings.settings_model import OtlpSettings, Settings, StorageSettings
from agent.settings.values import duration_s

__all__ = ["EngineSettings", "OtlpSettings", "Settings", "StorageSettings", "duration_s", "load"]
