# SPDX-License-Identifier: Apache-2.0
"""``RunConfig``: everything that a run can be told, and its image as a flat TOML recipe.

Each field of a part is one recipe key: ``RunConfig().lora.rank`` is ``lora.rank``, and
``train.batch_size`` is ``train.batch-size``.  The choices that FedNL's paper (arXiv 2605.16350)
leaves open are fields with a default, so that a recipe shows what was assumed.
"""

from fedloom.config.adapter import LoraConfig as LoraConfig
from fedloom.config.adapter import MemoryConfig as MemoryConfig
from fedloom.config.baselines import BASELINES as BASELINES
from fedloom.config.custom import CustomConfig as CustomConfig
from fedloom.config.faast import FaastConfig as FaastConfig
from fedloom.config.gate import GateConfig as GateConfig
from fedloom.config.gate import WireConfig as WireConfig
from fedloom.config.learning import WITH_SIDE as WITH_SIDE
from fedloom.config.learning import EvaluationConfig as EvaluationConfig
from fedloom.config.learning import ServerConfig as ServerConfig
from fedloom.config.learning import TrainConfig as TrainConfig
from fedloom.config.local import LocalConfig as LocalConfig
from fedloom.config.machine import ClientsConfig as ClientsConfig
from fedloom.config.machine import SamplingConfig as SamplingConfig
from fedloom.config.material import DataConfig as DataConfig
from fedloom.config.material import ModelConfig as ModelConfig
from fedloom.config.material import NiahConfig as NiahConfig
from fedloom.config.privacy import LINEAR as LINEAR
from fedloom.config.privacy import PrivacyConfig as PrivacyConfig
from fedloom.config.refine import RefineConfig as RefineConfig
from fedloom.config.run import RunConfig as RunConfig
