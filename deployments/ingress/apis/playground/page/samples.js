// Example inputs, so that one click gives an answer.

export const LIGHTHOUSE =
  "The lighthouse on Gull Point was built in 1871 from grey granite that was shipped across the bay " +
  "in forty barges. Its first keeper, Martha Kell, lived there for nineteen years and logged every " +
  "storm in a green notebook. In 1954 the oil lamp was replaced by an electric one, and since 1988 " +
  "the light has been switched on by a clock in the harbour office, eleven kilometres away.";

const BRIDGE =
  "Engineers finished the Orrin bridge in the spring of 1932, two years late. The delay was caused " +
  "by a flood that carried off the wooden scaffolding. Ada Quill, who had drawn the plans, refused " +
  "to shorten the pillars and paid for new timber herself. Today about 9,000 cars cross it each day.";

const BEES =
  "Honey bees tell each other where flowers are by dancing. A bee that returns to the hive walks in " +
  "a figure of eight; the angle of the middle line shows the direction relative to the sun, and the " +
  "length of the waggle shows the distance. Karl von Frisch decoded the dance and received a Nobel " +
  "Prize for it in 1973.";

export const QUESTIONS = [
  { title: "Lighthouse", question: "Who was the first keeper?", context: LIGHTHOUSE },
  { title: "Bridge", question: "Why was the bridge late?", context: BRIDGE },
  { title: "Bees", question: "What does the length of the waggle show?", context: BEES },
];

export const FILMS = [
  { title: "Praise", text: "A gorgeous, witty and quietly moving film." },
  { title: "Blame", text: "Two hours that feel like six, and not one joke lands." },
  { title: "Mixed", text: "The acting is superb, but the plot makes no sense at all." },
];

export const TOPICS = [
  {
    title: "Support mail",
    text: "My parcel was meant to arrive on Monday and the tracking page has not changed since.",
    labels: "delivery\npayment\nproduct quality\naccount",
  },
  {
    title: "Headline",
    text: "The central bank left its rate unchanged for the third time this year.",
    labels: "economy\nsports\nscience\ntravel",
  },
];

export const ENTITIES = [
  {
    title: "News",
    text: "Angela Moreno joined the Lisbon office of Northwind Robotics after six years at the University of Oslo.",
  },
  { title: "Travel", text: "We flew from Berlin to San Francisco and met Priya Nair in Oakland." },
];

export const MASKED = [
  { title: "Coffee", text: "Every morning she drinks a cup of [MASK] before work." },
  { title: "Capital", text: "Paris is the [MASK] of France." },
];

export const SENTENCES = [
  {
    title: "Music",
    source: "A man is playing a guitar.",
    sentences:
      "Someone strums an acoustic guitar.\nA woman plays the violin on stage.\nThe orchestra tunes its instruments.\nThe stock market fell on Monday.",
  },
  {
    title: "Recipes",
    source: "How do I bake bread without yeast?",
    sentences:
      "Soda bread rises with baking soda instead of yeast.\nKnead the dough for ten minutes.\nYeast is a single-celled fungus.\nThe bakery opens at six.",
  },
];

export const RANKED = [
  {
    title: "Documentation",
    query: "How do I undo the last commit?",
    texts:
      "`git revert` creates a commit that undoes an earlier one.\n`git stash` puts local changes aside.\n`git reset --soft HEAD~1` removes the last commit and keeps its changes.\n`git log` lists commits, the newest first.",
  },
  {
    title: "Biology",
    query: "Which animals sleep in winter?",
    texts:
      "Hedgehogs hibernate from November to March.\nSwallows fly south in autumn.\nSquirrels bury nuts and find most of them.\nBears spend the cold months in a den, half asleep.",
  },
];

export const TEXTS = [
  {
    title: "Three topics",
    texts:
      "A kitten sleeps on the sofa.\nThe cat chases a ball of wool.\nDogs love long walks.\nInterest rates rose again.\nThe bank published its figures.\nInflation slowed in May.\nAdd two eggs and the flour.\nStir the soup until it boils.",
  },
  {
    title: "Paraphrases",
    texts:
      "Where is the station?\nHow do I get to the train?\nCan you show me the way to the railway?\nThe weather is lovely.\nWhat a sunny day!",
  },
];

export const PASSAGES = [
  { title: "Lighthouse", text: LIGHTHOUSE },
  { title: "Bees", text: BEES },
  { title: "Short", text: "The train leaves at nine." },
];

export const CHATS = [
  { title: "Sea", text: "Write two sentences about the sea." },
  { title: "List", text: "Name three uses of a paper clip." },
  { title: "Explain", text: "Explain gravity to a child of six." },
];

export const OPENINGS = [
  { title: "Story", text: "Once upon a time, in a lighthouse by the sea," },
  { title: "Letter", text: "Dear neighbour,\n" },
];

export const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 30},
    "age": {"type": "integer"}
  },
  "required": ["name", "age"],
  "additionalProperties": false
}`;
