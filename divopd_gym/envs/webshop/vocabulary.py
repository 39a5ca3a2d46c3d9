"""Words of the generated catalogue: kinds of products, their options and the phrases of listings and requests."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEPARTMENTS", "DEPARTMENT_WEIGHTS", "OPTION_VALUES", "ProductKind"]


@dataclass(frozen=True)
class ProductKind:
    """What listings of one kind have in common.

    Attributes:
        query: the search that collects them.
        noun: one of them.
        path: their category path.
        attributes: phrases that may hold of one.
        materials: what one may be made of.
        uses: what it may be for.
        groups: option groups, the likeliest first.
        price: a usual price in dollars.
    """

    query: str
    noun: str
    path: tuple[str, ...]
    attributes: tuple[str, ...]
    materials: tuple[str, ...]
    uses: tuple[str, ...]
    groups: tuple[str, ...]
    price: float


_BEAUTY = "Beauty & Personal Care"
_HOME = "Home & Kitchen"
_TECH = "Electronics"
_DRESS = "Clothing, Shoes & Jewelry"
_FOOD = "Grocery & Gourmet Food"

DEPARTMENTS: dict[str, tuple[ProductKind, ...]] = {
    "beauty": (
        ProductKind(
            "face creams",
            "face cream",
            (_BEAUTY, "Skin Care", "Face", "Creams"),
            ("fragrance free", "anti aging", "long lasting", "cruelty free", "dry skin"),
            ("aloe", "shea butter", "rose oil"),
            ("night care", "morning routine", "travel"),
            ("size", "scent"),
            18.0,
        ),
        ProductKind(
            "hair brushes",
            "hair brush",
            (_BEAUTY, "Hair Care", "Styling Tools", "Brushes", "Paddle Brushes"),
            ("easy use", "easy clean", "hair growth", "travel size", "high quality"),
            ("bamboo", "wood", "nylon"),
            ("salon", "home", "curls"),
            ("color", "size"),
            12.0,
        ),
        ProductKind(
            "nail polish",
            "nail polish",
            (_BEAUTY, "Foot, Hand & Nail Care", "Nail Polish"),
            ("quick drying", "non toxic", "long lasting", "easy apply"),
            ("gel", "lacquer"),
            ("parties", "beginners", "nail art"),
            ("color",),
            9.0,
        ),
        ProductKind(
            "lip balms",
            "lip balm",
            (_BEAUTY, "Skin Care", "Lip Care", "Balms & Moisturizers"),
            ("seed oil", "sun protection", "natural ingredients", "paraben free"),
            ("honey", "coconut", "cocoa butter"),
            ("winter", "sport", "sensitive skin"),
            ("flavor name", "size"),
            6.0,
        ),
        ProductKind(
            "toothbrushes",
            "toothbrush",
            (_BEAUTY, "Oral Care", "Toothbrushes & Accessories", "Manual Toothbrushes"),
            ("oral hygiene", "eco friendly", "soft bristles", "sensitive teeth"),
            ("bamboo", "silicone"),
            ("adults", "children", "travel"),
            ("color", "size"),
            8.0,
        ),
    ),
    "electronics": (
        ProductKind(
            "headphones",
            "headphones",
            (_TECH, "Headphones, Earbuds & Accessories", "Headphones", "Over-Ear Headphones"),
            ("noise cancelling", "hands free", "fast charging", "high definition"),
            ("aluminum", "leather"),
            ("commuting", "studio", "gaming"),
            ("color", "style"),
            65.0,
        ),
        ProductKind(
            "phone cases",
            "phone case",
            ("Cell Phones & Accessories", "Cases, Holsters & Sleeves", "Basic Cases"),
            ("wireless charging", "heavy duty", "tempered glass", "case cover"),
            ("silicone", "leather", "carbon fiber"),
            ("hiking", "work", "everyday use"),
            ("color", "size"),
            15.0,
        ),
        ProductKind(
            "cables",
            "charging cable",
            (_TECH, "Computers & Accessories", "Cables & Interconnects", "USB Cables"),
            ("fast charging", "gold plated", "usb port", "high speed"),
            ("nylon", "copper"),
            ("laptop", "tablet", "camera"),
            ("size", "color"),
            11.0,
        ),
        ProductKind(
            "projectors",
            "projector",
            (_TECH, "Television & Video", "Video Projectors"),
            ("dual band", "high resolution", "easy carry", "ultra hd"),
            ("metal", "plastic"),
            ("home theater", "classroom", "backyard"),
            ("style", "color"),
            790.0,
        ),
        ProductKind(
            "tripods",
            "camera tripod",
            (_TECH, "Camera & Photo", "Tripods & Monopods", "Complete Tripods"),
            ("quick release", "light weight", "carrying case", "non slip"),
            ("aluminum", "carbon fiber"),
            ("vlogging", "stargazing", "portraits"),
            ("style",),
            48.0,
        ),
    ),
    "garden": (
        ProductKind(
            "throw pillows",
            "throw pillow",
            (_HOME, "Bedding", "Decorative Pillows, Inserts & Covers", "Throw Pillows"),
            ("machine washable", "super soft", "double sided", "living room"),
            ("velvet", "linen", "cotton"),
            ("sofa", "bedroom", "patio"),
            ("color", "size"),
            19.0,
        ),
        ProductKind(
            "console tables",
            "console table",
            (_HOME, "Furniture", "Living Room Furniture", "Tables", "Sofa & Console Tables"),
            ("solid wood", "easy assemble", "storage space", "wood finish"),
            ("oak", "walnut", "steel"),
            ("hallway", "living room", "entryway"),
            ("color", "size"),
            210.0,
        ),
        ProductKind(
            "curtains",
            "window curtain",
            (_HOME, "Home Décor Products", "Window Treatments", "Curtains & Drapes", "Panels"),
            ("machine washable", "white item", "living room", "printing technology"),
            ("linen", "polyester"),
            ("nursery", "kitchen", "dining room"),
            ("size", "color"),
            34.0,
        ),
        ProductKind(
            "area rugs",
            "area rug",
            (_HOME, "Home Décor Products", "Area Rugs, Runners & Pads", "Area Rugs"),
            ("easy clean", "non slip", "spot clean", "home decor"),
            ("wool", "jute", "polyester"),
            ("living room", "hallway", "office"),
            ("size", "color"),
            95.0,
        ),
        ProductKind(
            "desk lamps",
            "desk lamp",
            ("Tools & Home Improvement", "Lighting & Ceiling Fans", "Lamps & Shades", "Desk Lamps"),
            ("energy efficient", "easy install", "glass shade", "space saving"),
            ("brass", "glass", "bamboo"),
            ("reading", "office", "dorm"),
            ("color", "style"),
            42.0,
        ),
    ),
    "fashion": (
        ProductKind(
            "women's sandals",
            "women sandals",
            (_DRESS, "Women", "Shoes", "Sandals", "Flats"),
            ("open toe", "ankle strap", "rubber sole", "arch support"),
            ("leather", "canvas"),
            ("beach", "summer", "walking"),
            ("size", "color"),
            29.0,
        ),
        ProductKind(
            "men's shirts",
            "men shirt",
            (_DRESS, "Men", "Clothing", "Shirts", "Casual Button-Down Shirts"),
            ("slim fit", "long sleeve", "machine wash", "classic fit"),
            ("cotton", "linen", "flannel"),
            ("work", "vacation", "weddings"),
            ("size", "color", "fit type"),
            27.0,
        ),
        ProductKind(
            "backpacks",
            "backpack",
            ("Clothing, Shoes & Jewelry", "Luggage & Travel Gear", "Backpacks"),
            ("water resistant", "light weight", "laptop sleeve", "easy carry"),
            ("canvas", "nylon", "leather"),
            ("school", "hiking", "travel"),
            ("color", "style"),
            39.0,
        ),
        ProductKind(
            "wrist watches",
            "wrist watch",
            (_DRESS, "Men", "Watches", "Wrist Watches"),
            ("stainless steel", "water resistant", "quartz movement", "leather strap"),
            ("steel", "leather"),
            ("sport", "office", "evenings"),
            ("color", "style"),
            620.0,
        ),
    ),
    "grocery": (
        ProductKind(
            "herbal teas",
            "herbal tea",
            (_FOOD, "Beverages", "Coffee, Tea & Cocoa", "Tea", "Herbal"),
            ("caffeine free", "usda organic", "non gmo", "individually wrapped"),
            ("chamomile", "mint", "ginger"),
            ("evenings", "breakfast", "gifts"),
            ("flavor name", "size"),
            10.0,
        ),
        ProductKind(
            "snack bars",
            "snack bar",
            (_FOOD, "Snack Foods", "Bars", "Nut Bars"),
            ("gluten free", "plant based", "low sugar", "high protein"),
            ("almond", "oat", "peanut"),
            ("hiking", "school", "office"),
            ("flavor name", "size"),
            14.0,
        ),
        ProductKind(
            "chocolates",
            "chocolate",
            (_FOOD, "Snack Foods", "Candy & Chocolate", "Chocolate Bars"),
            ("dairy free", "fair trade", "artificial colors", "gift set"),
            ("cocoa", "hazelnut", "caramel"),
            ("birthdays", "holidays", "baking"),
            ("flavor name",),
            13.0,
        ),
    ),
}

DEPARTMENT_WEIGHTS = (24, 23, 21, 20, 12)

OPTION_VALUES: dict[str, tuple[str, ...]] = {
    "color": (
        "Black", "White", "Dark Blue", "Navy", "Olive Green", "Light Gray", "Rose Gold", "Burgundy", "Mustard",
        "Ivory/White", "Teal", "Charcoal", "A-red", "Multicolor 2", "Coffee",
    ),
    "style": ("Classic", "Modern", "Deluxe", "Basic", "With Case", "Set of 2", "Pro", "Vintage"),
    "scent": ("Lavender", "Fresh", "Unscented", "Rose/Vanilla", "Citrus"),
    "flavor name": ("Vanilla", "Dark Chocolate", "Honey Lemon", "Sea Salt", "Crème Brûlée", "Mixed Berry", "Mint"),
    "fit type": ("Men", "Women", "Regular", "Tall"),
}  # fmt: skip

SIZES: dict[str, tuple[str, ...]] = {
    "beauty": ("1 Count", "1 Count (Pack of 6)", "8 Ounce (Pack of 1)", "2.5 Fl Oz", "Small", "Large"),
    "electronics": ("5 ft", "6.6 ft", "10 ft", "3.3 ft", '6.1"', '6.7"', "Pack of 2"),
    "garden": ('28" x 28"', '18" x 18"', "3x5 ft", "8x10 ft", "52 x 84 Inch/Pair", "120cm", "Large"),
    "fashion": ("Small", "Medium", "Large", "X-Large", "XX-Large", "7", "7.5", "8", "9.5", "10", "One Size"),
    "grocery": ("8 Ounce (Pack of 1)", "12 Count", "20 Count (Pack of 3)", "1.5 Pound", "Sampler"),
}

COLOURS = ("black", "white", "navy blue", "grey", "green", "rose gold", "beige", "purple")
SYLLABLES = (
    "ka",
    "lo",
    "ven",
    "tri",
    "mu",
    "sor",
    "bel",
    "qua",
    "din",
    "fe",
    "zor",
    "pli",
    "nam",
    "ost",
    "ri",
)
TAILS = (
    "with Gift Box and 1 Year Warranty",
    "New and Improved, Made to Last for Years",
    "Perfect Present for Women, Men and Teens",
    "Simple, Modern and Ready to Use",
    "Best Choice for Everyday",
)
EXTRAS = (
    '28" x 28"',
    "★ Best Choice ★",
    "(Pack of 2)",
    "❤️ Gift",
    "5.5 Ft",
    "w/ Pouch",
    "中国 茶",
    "2-in-1",
    "™",
)

OPENINGS = (
    "This {noun} by {brand} is made of {material}.",
    "{brand} makes every {noun} from {material} with care.",
    "A {noun} of {material}, from {brand}.",
)
PRAISES = (
    "It is {attribute}, as you would want it.",
    "✔ {attribute} ✔ Our {noun} keeps its promise.",
    "{attribute}: tested by people who use it every day.",
    "Because the {noun} is {attribute}, you can rely on it.",
)
CLOSINGS = (
    "Write to us and we'll answer within 24 hours.",
    "Please allow 1-3 cm deviation due to manual measurement.",
    "A present that mothers, fathers and friends will like 🎁.",
    "Keep it dry. Wipe with a soft cloth.",
    "Colors may look different on your screen.",
    "Weighs 1.2 lbs (0.55 kg) and measures 10.5 x 4.2 in.",
)
REQUESTS = (
    "Look for {query} that are {listed}",
    "Buy a {noun} of {material} that is {listed}",
    "Get me {query} of {material} with {listed}",
)
HUMAN = (
    "i need a {noun} made of {material} that is {attribute}",
    "can you find a {attribute} {noun} of {material}",
    "looking for a {material} {noun}, it should be {attribute}",
)
