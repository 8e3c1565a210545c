"""Training a small network on scikit-learn's handwritten digits, for `pallas-ops demo`."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from sklearn.datasets import load_digits as sklearn_load_digits
from sklearn.model_selection import train_test_split

from ..compiler import compile_for_tpu
from ..tiles._collect import PRIMITIVES


PIXELS, HIDDEN, CLASSES = 64, 128, 10
BATCH_SIZE = 64
LEARNING_RATE = 3e-3

_SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True)
class Digits:
    """The images, as rows of 64 pixels between 0 and 1, and what they show."""

    train_images: Float[np.ndarray, "train 64"]
    train_labels: Int[np.ndarray, " train"]
    test_images: Float[np.ndarray, "test 64"]
    test_labels: Int[np.ndarray, " test"]

    @property
    def steps_per_epoch(self) -> int:
        """Full batches only: each step then has one shape, and is compiled once."""
        return len(self.train_labels) // BATCH_SIZE


def load_digits() -> Digits:
    """The digits, split always in the same way: three quarters to train on, the rest to test."""
    images, labels = sklearn_load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        (images / 16).astype(np.float32),
        labels.astype(np.int32),
        test_size=0.25,
        random_state=_SPLIT_SEED,
        stratify=labels,
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def make_model(key: PRNGKeyArray) -> eqx.nn.MLP:
    """A network with one hidden layer: two `equinox.nn.Linear`."""
    return eqx.nn.MLP(PIXELS, CLASSES, HIDDEN, depth=1, dtype=jnp.float32, key=key)


@dataclasses.dataclass(frozen=True)
class Training:
    """A model's training as pure functions of arrays, so that a step can also be read or compiled.

    **Arguments:**

    - `parameters`: the arrays of the model.
    - `state`: the optimiser's.
    - `step`: from parameters, state, images and labels to new parameters, new state and the loss.
    - `predict`: from parameters and images to labels.
    """

    parameters: PyTree
    state: PyTree
    step: Callable[..., tuple[PyTree, PyTree, Float[Array, ""]]]
    predict: Callable[..., Int[Array, " batch"]]


def make_training(model: eqx.nn.MLP) -> Training:
    """The training of a model with Adam."""
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    optimiser = optax.adam(LEARNING_RATE)

    def logits(parameters, images):
        return jax.vmap(eqx.combine(parameters, static))(images)

    def loss(parameters, images, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(parameters, images), labels)
        return jnp.mean(losses)

    def step(parameters, state, images, labels):
        value, gradients = jax.value_and_grad(loss)(parameters, images, labels)
        # Optax raises a Python float to an integer array's power, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimiser.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    def predict(parameters, images):
        return jnp.argmax(logits(parameters, images), axis=-1)

    return Training(parameters, optimiser.init(parameters), step, predict)


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of one training: the loss before each step, and the accuracy at the end."""

    losses: Float[np.ndarray, " steps"]
    accuracy: float


def _batches(digits: Digits, seed: int, epochs: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        order = generator.permutation(len(digits.train_labels))
        for step in range(digits.steps_per_epoch):
            yield order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]


def train(
    training: Training,
    digits: Digits,
    *,
    seed: int,
    epochs: int,
    on_step: Callable[[], Any] = lambda: None,
) -> Run:
    """Trains, and tests on the images that were kept back.

    **Arguments:**

    - `training`: what to train.
    - `digits`: the images.
    - `seed`: orders the batches: two runs with one seed see the same.
    - `epochs`: how often each image is seen.
    - `on_step`: called after each step.
    """
    step = jax.jit(training.step)
    parameters, state = training.parameters, training.state
    losses = []
    for batch in _batches(digits, seed, epochs):
        images, labels = digits.train_images[batch], digits.train_labels[batch]
        parameters, state, loss = step(parameters, state, images, labels)
        losses.append(float(loss))
        on_step()
    predicted = jax.jit(training.predict)(parameters, digits.test_images)
    accuracy = float(np.mean(np.asarray(predicted) == digits.test_labels))
    return Run(np.asarray(losses, np.float32), accuracy)


def step_arguments(training: Training) -> tuple[PyTree, ...]:
    """Arguments of one step as shapes and dtypes."""
    images = jax.ShapeDtypeStruct((BATCH_SIZE, PIXELS), jnp.float32)
    labels = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)
    return training.parameters, training.state, images, labels


def count_equations(jaxpr: Any, primitives: Sequence[str]) -> int:
    """How many equations of a jaxpr, and of all jaxprs inside it, are of some primitives."""
    inner = (jex_core.Jaxpr, jex_core.ClosedJaxpr)
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name in primitives
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, inner)
        ):
            if isinstance(value, inner):
                count += count_equations(value, primitives)
    return count


def operator_calls(training: Training) -> int:
    """The products of `pallas_ops.matmul` in one training step."""
    jaxpr = jax.make_jaxpr(training.step)(*step_arguments(training))
    return count_equations(jaxpr, PRIMITIVES)


def tpu_kernels(training: Training, device: str) -> int:
    """The Mosaic kernels in one training step as the TPU compiler leaves it."""
    compiled = compile_for_tpu(training.step, *step_arguments(training), device=device)
    return (compiled.as_text() or "").count('custom_call_target="tpu_custom_call"')
