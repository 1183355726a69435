"""What torch.compile calls while it traces, instead of tracing into it.

Imported only then: it brings in Dynamo, which takes a second.
"""

import torch

from depthroute.ops.backend import log_once

log = torch.compiler.assume_constant_result(log_once)
