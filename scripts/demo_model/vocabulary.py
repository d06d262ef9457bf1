"""Word lists the practice draws from, each split into a part to train on and one to test on."""

from __future__ import annotations

from random import Random

from scripts.demo_model.episode import held_out

_NAMES = """Ada Alan Grace Linus Maria John Anna Peter Paul Laura Emma Noah Olivia Liam Mia Lucas
Sofia Leo Clara Felix Nora Oscar Ivan Olga Boris Elena Raj Priya Arjun Wei Ming Yuki Kenji Hana
Omar Fatima Ali Layla Sam Alex Max Tom Tim Bob Alice Carol Dave Eve Frank Heidi Judy Mallory
Niels Ingrid Sven Lars Freya Pierre Marie Louis Chloe Hugo Jose Carlos Lucia Diego Ana Rosa Marta
Kofi Ama Zuri Amina Tariq Samira David Sarah Daniel Hannah James Mary Robert Linda Michael Susan
William Karen George Nancy Steven Betty Edward Helen Brian Donna Kevin Ruth Jason Sharon Gary
Ashley Nicholas Amy Eric Angela Jacob Brenda Larry Nicole Justin Julia Scott Kelly Brandon Ben
Turing Hopper Lovelace Curie Newton Smith Jones Miller Garcia Kim Lee Chen Singh Novak"""
_CITIES = """Paris London Berlin Rome Madrid Lisbon Vienna Prague Warsaw Oslo Stockholm Helsinki
Copenhagen Dublin Athens Istanbul Cairo Nairobi Lagos Delhi Mumbai Tokyo Kyoto Osaka Seoul Beijing
Shanghai Singapore Sydney Melbourne Auckland Toronto Montreal Boston Chicago Denver Seattle
Austin Dallas Miami Atlanta Houston Portland Lima Bogota Santiago Quito Brussels Amsterdam
Rotterdam Hamburg Munich Cologne Zurich Geneva Milan Naples Venice Florence Barcelona Valencia
Porto Krakow Budapest Sofia Bucharest Zagreb Riga Tallinn Vilnius Kyiv Tbilisi Dubai Doha
Bangkok Hanoi Manila Jakarta Bern Basel Lyon Nice Leeds York Oxford Cambridge Boulder"""
_WORDS = """apple banana cherry lemon mango orange peach pear plum grape melon berry bread butter
cheese honey sugar salt pepper soup pasta rice bean corn onion garlic tomato potato carrot cat dog
bird fish horse cow sheep goat pig mouse lion tiger bear wolf fox deer rabbit frog snake eagle owl
red green blue yellow black white brown purple pink silver gold sun moon star sky cloud rain snow
wind storm river lake ocean sea hill mountain forest tree leaf flower grass stone sand fire water
ice earth house door window table chair lamp clock book paper pencil letter word number page
school city street road bridge car bus train plane boat ship bike wheel engine hammer nail rope
ladder box bottle cup plate spoon fork knife shirt shoe hat coat glove ring music song dance
piano guitar drum violin game ball team player coach happy quiet quick slow bright dark warm cold
strong small large round flat soft hard sweet sour fresh clean empty open early late north south
east west summer winter spring autumn morning evening night monday friday token mesh worker
gateway scheduler model server cache batch stream signal network cable code test hello world
kernel python rust router block queue event trace span metric log data key value list tree graph
jump run walk swim read write sing draw paint cook build fix move push pull turn start stop
stressed level radar noon lamp planet rocket orbit comet galaxy robot laser magnet copper iron
zinc"""
_FIELDS = """name age city country email phone color size price count title author year score rank
level status type role team language currency amount weight height width length speed date day
month time hour minute id code key user username address street zip company job product brand
model version quantity total rating genre artist album song pages topic subject message text
query location unit item category priority owner path file format mode limit offset width depth
active enabled visible x y z width label tag note reason score seat room floor gate"""
_VERBS = """get find list show fetch look_up search check read open close create add make send
start stop delete remove update set book order buy cancel track count measure compute convert
translate play pause rate save load print scan schedule plan verify resize rename"""
_NOUNS = """weather forecast price stock flight hotel recipe song movie book order invoice ticket
user account balance message email contact meeting event reminder alarm timer note task file
folder photo video report summary score route distance temperature humidity voltage currency
parcel shipment package product review rating menu table room seat train bus taxi bike car engine
sensor lamp door heater printer camera robot server database record backup job queue token
playlist podcast article paper quote fact joke match team player league tide sunrise planet
permit badge lease exam grade course lesson vaccine dose patient crop harvest cargo"""
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"
_UNICODE = "äöüéèñçßøåžš€°µ你好世界日本語привет😀🎉🚀✨"


def _split(text: str, one_in: int) -> tuple[list[str], list[str]]:
    kept = list(dict.fromkeys(text.split()))
    return (
        [word for word in kept if not held_out(word, one_in)],
        [word for word in kept if held_out(word, one_in)],
    )


class Vocabulary:
    """The training half (`testing=False`) or the held-out half of every list."""

    def __init__(self, testing: bool) -> None:
        half = 1 if testing else 0
        self.names = _split(_NAMES, 6)[half]
        self.cities = _split(_CITIES, 6)[half]
        self.words = _split(_WORDS, 10)[half]
        self.fields = _split(_FIELDS, 8)[half]
        self.verbs = _split(_VERBS, 6)[half]
        self.nouns = _split(_NOUNS, 6)[half]
        self._half = half

    def made_up(self, rng: Random, syllables: int = 2) -> str:
        """A pronounceable word that exists in no list; the halves never share one."""
        while True:
            word = "".join(
                rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables)
            ) + rng.choice(("", "", "n", "r", "s", "x"))
            if held_out(word, 10) == bool(self._half):
                return word

    def word(self, rng: Random, made_up: float = 0.2) -> str:
        """A listed word, or with chance `made_up` an invented one."""
        return self.made_up(rng) if rng.random() < made_up else rng.choice(self.words)

    def name(self, rng: Random, made_up: float = 0.25) -> str:
        """A person's name, sometimes an invented one."""
        return self.made_up(rng).capitalize() if rng.random() < made_up else rng.choice(self.names)

    def city(self, rng: Random, made_up: float = 0.25) -> str:
        """A city's name, sometimes an invented one."""
        return self.made_up(rng).capitalize() if rng.random() < made_up else rng.choice(self.cities)


def unicode_scrap(rng: Random) -> str:
    """A few characters outside ASCII, so that no byte token stays untrained."""
    return "".join(rng.choices(_UNICODE, k=rng.randint(1, 4)))


TRAINING = Vocabulary(testing=False)
TESTING = Vocabulary(testing=True)
