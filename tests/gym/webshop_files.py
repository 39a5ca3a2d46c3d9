"""Writes a made-up catalogue in the benchmark's file format, for the tests of loading and indexing."""

import json

from divopd_gym.envs.webshop.generated import generate_products


def raw(product):
    prices = " - ".join(f"${price}" for price in product.prices)
    return {
        "asin": product.asin,
        "name": product.title,
        "full_description": product.description,
        "small_description": product.bullets,
        "pricing": prices,
        "images": [],
        "customization_options": {
            name: [{"value": value, "image": None} for value in values]
            for name, values in product.options.items()
        },
        "category": product.category,
        "query": product.query,
        "product_category": product.product_category,
    }


def write_catalogue(folder, count=30, seed=0, full=False):
    """The three files; returns the records."""
    products = list(generate_products(count, seed))
    records = [raw(product) for product in products]
    facts = {
        p.asin: {
            "attributes": p.attributes,
            **(
                {"instruction": p.instruction, "instruction_attributes": p.instruction_attributes}
                if p.instruction
                else {}
            ),
        }
        for p in products
    }
    human = {
        p.asin: [
            {
                "instruction": one["instruction"],
                "instruction_attributes": one["attributes"],
                "instruction_options": one["options"],
            }
            for one in p.human
        ]
        for p in products
        if p.human
    }
    nouns = {"made-up": {p.asin: p.nouns for p in products}}
    tail = "" if full else "_1000"
    for name, content in (
        (f"items_shuffle{tail}.json", records),
        (f"items_ins_v2{tail}.json", facts),
        ("items_human_ins.json", human),
        ("nouns.json", nouns),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return records
