"""The words that the generated questions and the generated text are made of."""


def _parts(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


PEOPLE = _parts(
    "Ada|Bruno|Carla|Dmitri|Elif|Farah|Goran|Hana|Ivo|Jana|Kofi|Lena|Mateo|Nadia|Omar|Petra|Quinn|Rosa|Sami|Tova|"
    "Ugo|Vera|Wim|Ximena|Yuki|Zoe|Amir|Beata|Cosmo|Dalia|Emil|Fiona|Gus|Helga|Ines|Joao"
)
CITIES = _parts(
    "Bergen|Lima|Zürich|Porto|Oslo|Quito|Gdańsk|Dakar|Málaga|Kyoto|Perth|Turin|Accra|Lyon|Riga|Hanoi|Cork|"
    "New Delhi|Cape Town|Santa Fe"
)
JOBS = _parts("baker|judge|pilot|nurse|sailor|farmer|tailor|painter|bus driver|watch maker|music teacher|diver")
PETS = _parts("cat|dog|horse|parrot|goat|rabbit|tortoise|pony")
COLOURS = _parts("grey|black|white|brown|red|spotted")

FIRST = _parts("Al|Bel|Cor|Dun|Es|Fal|Gar|Hol|Ip|Kel|Lin|Mar|Nor|Ost|Pel|Rav|Sel|Tor|Ul|Wen")
"""Beginnings of the towns' names; each is joined with each of `LAST`."""
LAST = _parts("ba|dale|den|ford|gate|ham|haven|holm|mere|minster|mouth|nick|port|stead|ton|wick")
RIVERS = _parts("Aune|Brel|Calla|Dorn|Esk|Fenn|Gala|Isk|Lorn|Mede|Nith|Orr|Pye|Rune|Sark|Tave")
LANDS = _parts("the northern hills|the eastern plain|the western coast|the southern lakes|the high moor")
TRADES = _parts("salt|wool|timber|glass|copper|herring|paper|cider")
FOUNDERS = _parts("a group of monks|two brothers|the crown|a guild of weavers|settlers from the coast")
BUILDINGS = _parts("town hall|stone bridge|harbour|market hall|lighthouse|railway station|grammar school")
ENDS = _parts("burned down|was rebuilt|was flooded|was sold|was widened")
TEAMS = _parts("rowing|cricket|football|chess|cycling")
