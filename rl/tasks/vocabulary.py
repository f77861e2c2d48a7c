"""The names, things and words that the families draw from."""

from __future__ import annotations

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo",
    "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
)  # fmt: skip
ITEMS = (
    "apples", "books", "coins", "stamps", "pens", "cards", "eggs", "shells", "stones", "tickets",
    "marbles", "flowers", "cookies", "buttons", "beads", "plums",
)  # fmt: skip
WORDS = tuple(
    """
    address almond antenna apple arrow assessment autumn avocado balloon banana barrel basket beetle
    bell berry bookkeeper bottle bubble butter button cabbage cactus camera candle cannon carrot
    castle cattle cellar cheese cherry chimney cinnamon circus cocoa coffee committee cookie copper
    corridor cotton cricket curtain daffodil desert dinner dollar dragon eleven engine envelope
    excellence feather fellow ferry fiddle forest freezer funnel galaxy gallery garage giraffe
    glasses gossip grammar hammer happiness harbor hello hippopotamus hollow honey illness indeed
    island jacket jelly jungle kettle kitten ladder lantern lemon letter lettuce lobster lollipop
    lullaby mammal market marmalade meadow melon message mirror mississippi mitten monkey mosquito
    mountain muffin mummy museum napkin needle noodle nugget onion orange orchard oregano otter
    paddle paper parallel parrot passenger peanut pebble pepper pillow pineapple possession potato
    puddle pumpkin puppet puzzle queen rabbit raccoon radar raspberry referee ribbon river rocket
    rubber saddle sandal sausage scissors seesaw session shampoo silver sleeve slipper soccer
    spaghetti spinnaker squirrel statistics strawberry street success suggestion summer sunflower
    taxi teddy teeter tennessee ticket titanic tobacco tomato traffic trumpet tunnel turtle umbrella
    unusual valley vanilla vessel village violin volcano waffle wallet water weekend wheel whistle
    willow window winter wooden yellow zebra zigzag
    """.split()  # noqa: SIM905 - a block of text is easier to read and to sort than a list
)
