"""lmhead: a language model's head in a service of its own, as one line of a PyTorch trainer.

    head = lmhead.RemoteHead("grpc://head-0:50051", "lm")
    with head.step(number) as step:
        loss = step.loss(trunk(input_ids), labels, shift=True)
        loss.backward()
        clipped = lmhead.clip_grad_norm(trunk.parameters(), step.prepare(), max_norm=1.0)
        step.commit(learning_rate=lr, grad_multiplier=clipped.grad_multiplier)

docs/PYTHON.md is the manual.
"""

from lmhead._native import version
from lmhead.client import Client
from lmhead.elastic import elastic_step
from lmhead.errors import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, Error, FailedPrecondition,
                           HeadPoisoned, Internal, InvalidArgument, NotFound, PermissionDenied, ResourceExhausted,
                           StepLost, Unauthenticated, Unavailable, Unimplemented)
from lmhead.evaluation import Evaluation
from lmhead.gradients import Clipped, average_gradients, clip_grad_norm
from lmhead.head import SGD, AdamW, HeadInfo, RemoteHead
from lmhead.huggingface import PatchedModel, head_arguments, patch
from lmhead.logprobs import Logprobs
from lmhead.loss import LossFuture
from lmhead.recipe import ClippedPolicy, Distillation, PolicyCoefficients, Recipe
from lmhead.step import Commit, Report, Step
from lmhead.teacher import TeacherStream
from lmhead.workers import RankFailed, Workers, distributed_workers, named_workers

__version__ = version()
__all__ = [
    "Aborted", "AdamW", "AlreadyExists", "Cancelled", "Client", "Clipped", "ClippedPolicy", "Commit", "DataLoss",
    "DeadlineExceeded", "Distillation", "Error", "Evaluation", "FailedPrecondition", "HeadInfo", "HeadPoisoned", "Internal",
    "InvalidArgument", "Logprobs", "LossFuture", "NotFound", "PatchedModel", "PermissionDenied", "PolicyCoefficients", "RankFailed",
    "Recipe", "RemoteHead", "Report", "ResourceExhausted", "SGD", "Step", "StepLost", "TeacherStream", "Unauthenticated",
    "Unavailable", "Unimplemented", "Workers", "average_gradients", "clip_grad_norm", "distributed_workers", "elastic_step",
    "head_arguments", "named_workers", "patch", "version",
]
