"""A plant's own classifier on the encoder that a run began with."""

import numpy as np

from tests.support.method_cases import drafted, equal, images
from trainer.data.class_folders import Images
from trainer.models.fusion import NORMALISED, infer_fusion
from trainer.models.network import to_arrays
from trainer.training.own_head import fit_own_head
from trainer.training.participant import Participant


def test_it_is_a_model_on_the_first_encoder_that_knows_the_plants_classes() -> None:
    spec, broadcast = drafted("fedavg")
    train = images(1, 24)
    node = Participant(spec, "plant-1", Images(train, None))
    head = fit_own_head(node, broadcast)
    assert infer_fusion(head.tensors) == NORMALISED
    encoder = {name: value for name, value in broadcast.items() if name.startswith("encoder.")}
    assert equal({name: to_arrays(head.tensors)[name] for name in encoder}, encoder)
    named = node.predict_held_out(head.tensors, images(101, 24)).argmax(1)
    assert (named == images(101, 24).labels).mean() > 0.75
    assert (head.left_out.argmax(1) == train.labels).mean() > 0.75


def test_what_it_says_of_an_image_that_is_left_out_has_nothing_to_do_with_its_label() -> None:
    spec, broadcast = drafted("fedavg")
    train = images(1, 24)
    random = train._replace(labels=np.random.default_rng(0).permutation(train.labels))
    node = Participant(spec, "plant-1", Images(random, None))
    head = fit_own_head(node, broadcast)
    assert (head.left_out.argmax(1) == random.labels).mean() < 0.75
