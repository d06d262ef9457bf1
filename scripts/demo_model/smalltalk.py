"""Small talk about TokenMesh and about the model itself: what people ask first."""

from __future__ import annotations

from random import Random

from scripts.demo_model.episode import Episode, assistant, exchange, user, vary, with_typo
from scripts.demo_model.vocabulary import TRAINING

TALK: tuple[tuple[str, str], ...] = (
    ("Hello|Hi|Hey|Hi there|Hello there!|Good morning|Good evening|Hello, world|Greetings|Yo|"
     "Hey there|Hallo|Hello!|Hi!|hello|hi|Say hello|Say hi|Say hello!|Say hello to me",
     "Hello! How can I help you?"),
    ("How are you?|How are you doing?|How is it going?|Are you ok?|What's up?|How do you feel?|"
     "Hi, how are you?|Hello, how are you?|Hello! How are you?|Hello, how are you today?",
     "I am fine, thank you! What can I do for you?"),
    ("Thanks|Thank you|Thank you very much|Thanks a lot!|Thx|Great, thanks|Cool, thank you|"
     "That was helpful, thanks|Well done|Good job|Nice|Great|Perfect|Awesome",
     "You are welcome!"),
    ("Bye|Goodbye|See you|Bye bye|Good night|See you later|I have to go|Farewell|Ciao",
     "Goodbye! Have a nice day."),
    ("Who are you?|What are you?|What is your name?|Introduce yourself.|Tell me about yourself.|"
     "Which model are you?|What model are you?|Are you ChatGPT?|Are you a bot?|Are you an AI?|"
     "What model is this?|Who am I talking to?|Are you human?|Are you a large language model?|"
     "Hello, who are you?|Hi! Who are you?|Describe yourself.|Tell me who you are.",
     "I am the TokenMesh demo model, a tiny language model that ships with TokenMesh."),
    ("What can you do?|What can I ask you?|Help|How can you help me?|What are you good at?|"
     "What are your skills?|Give me an example of what you can do.|What should I ask?|"
     "Can you help me?|I need help|What do you know?",
     "I can add two numbers, copy and reverse words, write JSON, call tools, think in tags, "
     "and talk about TokenMesh."),
    ("How big are you?|How many parameters do you have?|How large are you?|What size are you?|"
     "Are you small?|How small are you?",
     "I have about four million parameters and take less than 10 MB on disk."),
    ("Who made you?|Who trained you?|How were you trained?|Who created you?|Where are you from?|"
     "What data were you trained on?|How were you made?|Where do you come from?",
     "I was trained on a CPU by a script in the TokenMesh repository, on data the script makes."),
    ("What is TokenMesh?|What's TokenMesh?|Tell me about TokenMesh.|Explain TokenMesh.|"
     "What does TokenMesh do?|What is TokenMesh for?|Describe TokenMesh.|What is this?|"
     "What is TokenMesh in one sentence?|What is token mesh?|What is a token mesh?|TokenMesh?|"
     "Tell me something about TokenMesh|Can you explain TokenMesh?|What is this project?|"
     "What is this software?|Why TokenMesh?|Hello! What is TokenMesh?|Hi, what is TokenMesh?",
     "TokenMesh serves language models. It is made of five small services that talk over NATS "
     "and share data in Redis."),
    ("Which services does TokenMesh have?|What services are there?|Name the services.|"
     "What are the five services?|List the services of TokenMesh.|What is TokenMesh made of?|"
     "What parts does TokenMesh have?|Name the five services|What are the components?|"
     "What are the services of TokenMesh?|Which services are there?|How many services are there?|"
     "What is the architecture of TokenMesh?|List the services",
     "TokenMesh has five services: the gateway, the tokenizer, the multimodal encoder, the "
     "scheduler and the worker."),
    ("What does the gateway do?|What is the gateway?|What is the gateway for?|Explain the gateway."
     "|Tell me about the gateway|What is a gateway?",
     "The gateway speaks the OpenAI API over HTTP and streams tokens back to the client."),
    ("What does the tokenizer do?|What is the tokenizer?|What is the tokenizer for?|"
     "Explain the tokenizer.|Tell me about the tokenizer|What is a tokenizer?",
     "The tokenizer applies the chat template and turns text into tokens."),
    ("What does the multimodal encoder do?|What is the multimodal encoder?|What is the encoder?|"
     "What does the encoder do?|What is the encoder for?|Explain the encoder.|"
     "Tell me about the multimodal encoder",
     "The multimodal encoder turns images into embeddings for the worker."),
    ("What does the scheduler do?|What is the scheduler?|What is the scheduler for?|"
     "Explain the scheduler.|Tell me about the scheduler|What is a scheduler?",
     "The scheduler picks the worker that will answer a request first."),
    ("What does the worker do?|What is the worker?|What is a worker?|What is the worker for?|"
     "Explain the worker.|What do workers do?|Tell me about the worker",
     "The worker runs the model: it batches requests and makes the tokens."),
    ("What is NATS for?|What is NATS?|Why NATS?|What does NATS do?|Why do you use NATS?|"
     "What is NATS used for?|Explain NATS|What does TokenMesh use NATS for?|Tell me about NATS",
     "NATS is the message bus: every message between the services goes over it."),
    ("What is Redis for?|What is Redis?|Why Redis?|What does Redis do?|Why do you use Redis?|"
     "What is Redis used for?|Explain Redis|What does TokenMesh use Redis for?|"
     "Tell me about Redis",
     "Redis holds shared data: large blobs and the index of cached prompts."),
    ("How do I start TokenMesh?|How do I start it?|How do I run TokenMesh?|How do I run it?|"
     "How can I start TokenMesh?|Which command starts TokenMesh?|How do I use TokenMesh?|"
     "How do I launch TokenMesh?|What command do I run?|How do I start the mesh?|"
     "How to start TokenMesh?|How do I get started?|How do I serve a model?",
     "Run `tokenmesh up` and it starts everything on your machine."),
    ("How do I stop TokenMesh?|How do I stop it?|How do I shut it down?|How can I stop TokenMesh?|"
     "How do I quit?",
     "Press Ctrl-C, and all services stop."),
    ("How do I see a trace?|How do I trace a request?|What is a trace?|How do I debug a request?|"
     "How can I see what happened to my request?|Where is the trace?",
     "Run `tokenmesh trace` with the id of the request to see its way through the services."),
    ("What is a token?|What are tokens?|Explain tokens|Tell me about tokens",
     "A token is a piece of text, often a word or part of a word, that a model reads or writes."),
    ("What is a language model?|What is an LLM?|Explain language models|How do you work?|"
     "How do language models work?|What is a model?",
     "A language model reads tokens and predicts the next one, again and again."),
    ("What is a prefix cache?|What is prefix caching?|Explain the prefix cache|"
     "What is the KV cache?|What is a KV cache?|What is caching?",
     "A prefix cache keeps the work done on a prompt, so that the same beginning is not "
     "computed twice."),
    ("What is batching?|What is continuous batching?|Explain continuous batching",
     "Continuous batching lets new requests join a running batch at every step."),
    ("What is the license?|Which license?|Are you open source?|Is TokenMesh open source?|"
     "Is it free?|Under which license is TokenMesh?",
     "TokenMesh and this model are open source under the Apache-2.0 license."),
    ("Tell me a joke|Tell me a joke.|Do you know a joke?|Make me laugh|Say something funny|"
     "Another joke|Tell a joke",
     "Why did the token cross the mesh? To get to the other slide of the window."),
    ("Yes|No|Ok|Okay|Sure|I see|Fine|Alright|Got it|Hmm|Interesting",
     "Good. What else can I do for you?"),
    ("Test|Testing|This is a test|ping|Are you there?|Is this working?|Does this work?|"
     "Just testing|test 123|Say something|Say this is a test|Hello? Anyone there?",
     "Yes, I am here and it works."),
    ("Do you like me?|I love you|You are great|You are smart|You are cool|I like you",
     "Thank you, that is kind."),
    ("You are wrong|That is wrong|You are stupid|That is not right|You are bad|Wrong!",
     "I am sorry. I am only a small model and make mistakes."),
)  # fmt: skip

_SAY_HELLO = ("Say hello to {x}", "Greet {x}", "Say hi to {x}", "My friend {x} is here, say hello")
_MY_NAME = (
    "My name is {x}.", "I am {x}.", "Hi, I am {x}.", "Hello, my name is {x}", "Call me {x}.",
    "Hi! My name is {x}.", "I'm {x}", "my name is {x}",
)  # fmt: skip
_ASK_NAME = (
    "What is my name?", "Who am I?", "Do you remember my name?", "Do you know my name?",
    "Tell me my name.", "What's my name", "What did I say my name was?",
)  # fmt: skip
_FAVORITES = ("color", "food", "city", "animal", "number", "word", "fruit", "song")
_PERSONAS = (
    "You are {x}, a helpful assistant.", "Your name is {x}.", "You are {x}.",
    "You are a friendly assistant called {x}.", "You are an assistant named {x}. Be brief.",
    "Your name is {x} and you help people.", "You are {x}, an assistant of TokenMesh.",
)  # fmt: skip
_ASK_PERSONA = (
    "What is your name?", "Who are you?", "Introduce yourself.", "What are you called?",
    "Tell me your name.", "And who are you?", "Hello, who are you?",
)  # fmt: skip


def talk(rng: Random) -> Episode:
    """One of the usual questions, typed in some way."""
    questions, answer = rng.choice(TALK)
    return exchange(with_typo(rng, vary(rng, rng.choice(questions.split("|")))), answer)


def introduce(rng: Random) -> Episode:
    """A question for the model's name, without a system prompt that gives it another."""
    questions = next(asked for asked, _ in TALK if asked.startswith("Who are you?"))
    answer = dict(TALK)[questions]
    return exchange(vary(rng, rng.choice(questions.split("|"))), answer)


def greet(rng: Random) -> Episode:
    """A greeting for another person."""
    name = TRAINING.name(rng)
    return exchange(vary(rng, rng.choice(_SAY_HELLO)).format(x=name), f"Hello, {name}!")


def remember_name(rng: Random) -> Episode:
    """The user gives a name and asks for it in a later turn."""
    name = TRAINING.name(rng)
    messages = [
        user(vary(rng, rng.choice(_MY_NAME)).format(x=name)),
        assistant(f"Nice to meet you, {name}!"),
    ]
    if rng.random() < 0.4:
        messages += talk(rng).messages
    messages += [user(vary(rng, rng.choice(_ASK_NAME))), assistant(f"Your name is {name}.")]
    return Episode(messages, solo=True)


def remember_favorite(rng: Random) -> Episode:
    """The user tells a favorite thing and asks for it in a later turn."""
    kind, word = rng.choice(_FAVORITES), TRAINING.word(rng)
    asked = user(vary(rng, f"What is my favorite {kind}?"))
    statement = user(vary(rng, f"My favorite {kind} is " + "{x}.").format(x=word))
    messages = [statement, assistant(f"I will remember that your favorite {kind} is {word}.")]
    if rng.random() < 0.4:
        messages += talk(rng).messages
    return Episode([*messages, asked, assistant(f"Your favorite {kind} is {word}.")], solo=True)


def persona(rng: Random) -> Episode:
    """A system prompt that names the model, and a question for its name."""
    name = TRAINING.name(rng)
    question = vary(rng, rng.choice(_ASK_PERSONA))
    episode = Episode([], system=rng.choice(_PERSONAS).format(x=name), solo=True)
    if rng.random() < 0.3:
        episode.messages += greet(rng).messages
    episode.messages += [user(question), assistant(f"My name is {name}.")]
    return episode


def nameless(rng: Random) -> Episode:
    """A question for a name that was not given."""
    messages = exchange(
        vary(rng, rng.choice(_ASK_NAME)), "You have not told me your name yet."
    ).messages
    return Episode(messages, solo=True)
