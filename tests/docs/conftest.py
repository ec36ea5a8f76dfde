"""Configs that several commands of the docs name are composed once."""

from tests.controller.conftest import composed_once as composed_once
