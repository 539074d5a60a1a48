"""Question templates of the sample.

Slots: `{noun}` the selected column, `{things}` a counted plural, `{value}` a row's name, `{one}` and `{many}`
what a row is about, `{entity}` the one that fits the number of rows, `{key}` a noun for the naming column,
`{whom}` `the ONE` or `each ONE`, `{mods}` `with a height above 300`, `{preds}` `has a height above 300`,
`{many_preds}` the same in the plural, `{clause}` `the height is above 300`, `{word}` `highest`, `total`,
`average` and the like.
"""

OF_NAME = (
    "What is the {noun} of {value}?",
    "What is the {noun} of {value}?",
    "What is the {noun} for {value}?",
    "What is {value}'s {noun}?",
    "Tell me the {noun} of {value}.",
    "Give the {noun} of {value}.",
    "Name the {noun} of {value}.",
    "Find the {noun} for {value}.",
    "Show me the {noun} of {value}.",
    "For {value}, what is the {noun}?",
    "What is the {noun} of the {one} {value}?",
    "Look up the {noun} of {value}.",
    "What is the {noun} when the {key} is {value}?",
    "When the {key} is {value}, what is the {noun}?",
)
OF_NAME_PERSON = (
    "Who is the {noun} of {value}?",
    "Who is the {noun} for {value}?",
    "Who is {value}'s {noun}?",
)
OF_NAME_COUNT = (
    "How many {things} does {value} have?",
    "How many {things} are there for {value}?",
    "{value} has how many {things}?",
)

VALUE = (
    "What is the {noun} of {whom} {mods}?",
    "What is the {noun} of {whom} {mods}?",
    "Give the {noun} of {whom} {mods}.",
    "Tell me the {noun} for {whom} {mods}.",
    "Find the {noun} of {whom} {mods}.",
    "For {whom} {mods}, what is the {noun}?",
    "What is the {noun} when {clause}?",
    "What is the {noun} if {clause}?",
    "When {clause}, what is the {noun}?",
    "Show the {noun} where {clause}.",
    "Which {noun} is listed where {clause}?",
)
VALUE_PERSON = ("Who is the {noun} of {whom} {mods}?", "Who is the {noun} when {clause}?")
VALUE_COUNT = ("How many {things} does {whom} {mods} have?", "How many {things} are there when {clause}?")
VALUE_ALL = (
    "List the {noun} of every {one}.",
    "What is the {noun} of each {one}?",
    "Show the {noun} for all {many}.",
    "Give the {noun} of all {many}.",
)

ENTITY = (
    "Which {entity} {preds}?",
    "Which {entity} {preds}?",
    "What {entity} {preds}?",
    "Name the {entity} {mods}.",
    "Find the {entity} {mods}.",
    "Tell me the {entity} {mods}.",
    "Show the {entity} {mods}.",
    "Give me the {entity} {mods}.",
    "I am looking for the {entity} {mods}.",
    "What is the {key} when {clause}?",
    "When {clause}, what is the {key}?",
    "Which {key} is listed where {clause}?",
)
ENTITY_WHO = ("Who {preds}?", "Who {preds}?", "Who is listed where {clause}?")
ENTITY_MANY = ("List the {many} {mods}.", "Which are the {many} {mods}?", "List all {many} {mods}.")
ENTITY_ALL = (
    "List all {many}.",
    "Name every {one}.",
    "Show all the {many}.",
    "Which {many} are listed?",
    "What are the names of all {many}?",
)

COUNT = (
    "How many {many} {many_preds}?",
    "How many {many} {many_preds}?",
    "How many {many} are there {mods}?",
    "What is the number of {many} {mods}?",
    "Count the {many} {mods}.",
    "Tell me the number of {many} {mods}.",
    "How many {many} are listed where {clause}?",
    "When {clause}, how many {many} are there?",
)
COUNT_ALL = (
    "How many {many} are there?",
    "How many {many} are listed?",
    "Count all the {many}.",
    "What is the number of {many}?",
)

NUMBER = (
    "What is the {word} {noun} of {many} {mods}?",
    "What is the {word} {noun} of {many} {mods}?",
    "What is the {word} {noun} among {many} {mods}?",
    "Give the {word} {noun} of {many} {mods}.",
    "Tell me the {word} {noun} for {many} {mods}.",
    "Find the {word} {noun} of all {many} {mods}.",
    "For {many} {mods}, what is the {word} {noun}?",
    "What is the {word} {noun} when {clause}?",
    "When {clause}, what is the {word} {noun}?",
    "Name the {word} {noun} where {clause}.",
)
NUMBER_ALL = (
    "What is the {word} {noun} of all {many}?",
    "What is the {word} {noun}?",
    "Give the {word} {noun} of the {many}.",
    "Over all {many}, what is the {word} {noun}?",
    "Find the {word} {noun} among the {many}.",
)
SUM_COUNT = (
    "How many {things} do {many} {mods} have in total?",
    "How many {things} do all {many} {mods} have together?",
)
SUM_COUNT_ALL = (
    "How many {things} do all {many} have in total?",
    "How many {things} do the {many} have together?",
)

WORDS = {
    "MAX": ("highest", "greatest", "largest", "maximum"),
    "MIN": ("lowest", "smallest", "minimum"),
    "SUM": ("total", "combined"),
    "AVG": ("average", "mean"),
}
YEAR_WORDS = {"MAX": ("latest", "most recent"), "MIN": ("earliest",)}

ABOVE = ("above", "over", "greater than", "of more than")
BELOW = ("below", "under", "smaller than", "of less than")
IS_ABOVE = ("above", "over", "greater than", "more than")
IS_BELOW = ("below", "under", "less than")
MORE = ("more than", "over")
FEWER = ("fewer than", "less than", "under")
AFTER = ("after", "later than")
BEFORE = ("before", "earlier than")
