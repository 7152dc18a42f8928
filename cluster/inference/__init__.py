"""Text from a model: where its parts lie (places.py), what it is asked (prompts.py), and a model that is divided over
the stages of a pipeline (stages.py, talk.py). generate.py is the script."""

import course  # noqa: F401  step 9 is on the path from here on
