"""The serving configuration: one frozen tree, built once, sent whole to every rank.

The same tree comes from command-line flags (named as vLLM's where they mean the same) or a YAML
file whose keys are the flags without dashes. Every refusal names its key. No torch: frontend,
checks and ranks all import this package. One file a section; the text under a key is what the
docs say of it.
"""

from mstar_tp.config.engine import EngineConfig
from mstar_tp.config.files import load_config, read_tree
from mstar_tp.config.lora import LoraConfig, adapter_name_fault
from mstar_tp.config.parse import ConfigFindings, build_config, parse_config
from mstar_tp.config.server import ServerConfig
from mstar_tp.config.tree import ServeConfig, all_keys

__all__ = [
    "ConfigFindings",
    "EngineConfig",
    "LoraConfig",
    "ServeConfig",
    "ServerConfig",
    "adapter_name_fault",
    "all_keys",
    "build_config",
    "load_config",
    "parse_config",
    "read_tree",
]
