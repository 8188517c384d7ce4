"""Word lists of the synthetic head-composition tasks.

The lists are this package's own. They are small, to suit small models; no word is in two lists or in the wording of
the tasks, so each word identifies its list. Every entry is a single word: each answer is exactly one token of
:func:`dcformer.synthetic.build_tokenizer`.

A *relation* maps each possible answer to the entities that have it, e.g. ``{"France": ("Paris", "Lyon")}``: an entity
occurs once in a relation, so a relation is also a function from entity to answer.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

Relation = Mapping[str, Sequence[str]]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _words(
    "Anna Boris Clara David Emma Felix Grace Henry Irene Jack Kate Leo Maria Noah Olga Peter"
)

CLASS_TO_OBJECTS: Relation = {
    "mammal": _words("fox wolf bear horse goat tiger rabbit"),
    "bird": _words("eagle sparrow owl penguin crow parrot pigeon"),
    "fish": _words("salmon trout tuna shark carp herring cod"),
    "insect": _words("bee ant moth wasp beetle mosquito cricket"),
    "fruit": _words("apple banana cherry mango peach pear plum"),
    "vegetable": _words("carrot onion cabbage potato spinach turnip leek"),
    "drink": _words("tea coffee milk juice water lemonade cider"),
    "clothing": _words("shirt coat skirt sweater jacket dress scarf"),
    "vehicle": _words("car bus truck train tractor taxi van"),
    "instrument": _words("violin piano flute guitar drum trumpet harp"),
    "furniture": _words("chair table sofa bed desk bench wardrobe"),
    "tree": _words("oak pine birch maple willow cedar elm"),
}

COUNTRY_TO_CITIES: Relation = {
    "Canada": ("Toronto", "Montreal"),
    "China": ("Beijing", "Shanghai"),
    "Egypt": ("Cairo", "Luxor"),
    "France": ("Paris", "Lyon"),
    "Germany": ("Berlin", "Munich"),
    "India": ("Delhi", "Mumbai"),
    "Italy": ("Rome", "Milan"),
    "Japan": ("Tokyo", "Osaka"),
    "Norway": ("Oslo", "Bergen"),
    "Peru": ("Lima", "Cusco"),
    "Poland": ("Warsaw", "Krakow"),
    "Spain": ("Madrid", "Seville"),
}

CAPABILITY_TO_TOOLS: Relation = {
    "calculate": ("calculator", "abacus"),
    "clean": ("broom", "mop"),
    "climb": ("ladder", "rope"),
    "cook": ("oven", "stove"),
    "cut": ("knife", "axe"),
    "dig": ("shovel", "spade"),
    "heat": ("heater", "radiator"),
    "light": ("lamp", "candle"),
    "measure": ("ruler", "scale"),
    "paint": ("brush", "roller"),
    "sew": ("needle", "thimble"),
    "write": ("pen", "pencil"),
}

OPPOSITES: tuple[tuple[str, str], ...] = (
    ("tall", "short"),
    ("rich", "poor"),
    ("happy", "sad"),
    ("strong", "weak"),
    ("fast", "slow"),
    ("young", "old"),
    ("brave", "timid"),
    ("gentle", "harsh"),
    ("neat", "messy"),
    ("loud", "quiet"),
    ("healthy", "sick"),
    ("generous", "greedy"),
    ("polite", "rude"),
    ("honest", "dishonest"),
)

ORDINALS: tuple[str, ...] = _words("first second third fourth fifth sixth seventh eighth ninth tenth")
DAYS: tuple[str, ...] = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS: tuple[str, ...] = _words(
    "January February March April May June July August September October November December"
)


def identity(words: Iterable[str]) -> Relation:
    """Relation of the *copy* transformation: each word has itself as its answer."""
    return {word: (word,) for word in words}


def opposites(pairs: Iterable[tuple[str, str]]) -> Relation:
    """Relation adjective -> opposite, both ways round for each pair."""
    return {answer: (entity,) for one, other in pairs for answer, entity in ((one, other), (other, one))}


def successors(sequence: Sequence[str], *, cyclic: bool) -> Relation:
    """Relation item -> the item after it; with ``cyclic`` the last item is followed by the first."""
    following = {after: (before,) for before, after in itertools.pairwise(sequence)}
    return {**following, sequence[0]: (sequence[-1],)} if cyclic else following


def predecessors(sequence: Sequence[str], *, cyclic: bool) -> Relation:
    """Relation item -> the item before it; with ``cyclic`` the first item is preceded by the last."""
    return successors(sequence[::-1], cyclic=cyclic)


def entities(relation: Relation) -> tuple[str, ...]:
    """All entities of a relation, in its order."""
    return tuple(entity for members in relation.values() for entity in members)


def word_lists() -> dict[str, tuple[str, ...]]:
    """Every word list by name; the lists share no word."""
    return {
        "names": NAMES,
        "classes": tuple(CLASS_TO_OBJECTS),
        "objects": entities(CLASS_TO_OBJECTS),
        "countries": tuple(COUNTRY_TO_CITIES),
        "cities": entities(COUNTRY_TO_CITIES),
        "capabilities": tuple(CAPABILITY_TO_TOOLS),
        "tools": entities(CAPABILITY_TO_TOOLS),
        "adjectives": tuple(adjective for pair in OPPOSITES for adjective in pair),
        "ordinals": ORDINALS,
        "days": DAYS,
        "months": MONTHS,
    }
