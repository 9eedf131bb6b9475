"use strict"
// The page of `envbus dashboard`. What comes from runs is put into the page as text, never as HTML.

const element = id => document.getElementById(id)
const SECONDS = 600
const HEIGHT = 110
const ROW = 26
const SPARE = 6
// Columns of what the server sends as lists: `frames.py`.
const PART = { run: 0, owner: 1, name: 2, kind: 3, state: 4, ready: 5, all: 6, rate: 7, faults: 8, restarts: 9, command: 10 }
const PROCESS = { run: 0, part: 1, name: 2, pid: 3, state: 4, first: 5, end: 6, rate: 7, stalled: 8, incarnation: 9, cpu: 10, memory: 11 }
const FAULT = { at: 0, run: 1, part: 2, cause: 3, process: 4, env: 5, message: 6 }
const EPISODE = { id: 0, client: 1, isThere: 2, waits: 3, queued: 4, calls: 5 }
const CAUSES = ["crash", "error", "timeout", "memory", "request", "lost"]

// --- numbers as text ----------------------------------------------------------------------------

function scaled(value, base, units) {
  let unit = 0
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit += 1 }
  const digits = unit === 0 && Number.isInteger(value) ? 0 : Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0
  return value.toFixed(digits) + units[unit]
}
const plain = value => value == null ? "–" : scaled(value, 1000, ["", "k", "M", "G"])
const bytes = value => value == null ? "–" : scaled(value, 1024, [" B", " KiB", " MiB", " GiB"])
const cores = value => value == null ? "–" : value.toFixed(2)
const milliseconds = value => value == null ? "–" : `${(value * 1e3).toPrecision(3)} ms`
const seconds = value => value > 0 ? `${value.toFixed(1)} s` : ""
const clock = at => new Date(at * 1e3).toTimeString().slice(0, 8)

function write(node, text) {
  if (node.textContent !== text) node.textContent = text
}

function make(tag, text, name) {
  const node = document.createElement(tag)
  if (text !== undefined) node.textContent = text
  if (name) node.className = name
  return node
}

// --- tables of any length -----------------------------------------------------------------------

class Table {
  // columns: [title, width, value of a row, its text, more: {number, look}]
  constructor(root, columns, keyOf, onClick) {
    this.columns = columns
    this.keyOf = keyOf
    this.onClick = onClick
    this.rows = []
    this.shown = []
    this.sorted = null
    this.down = false
    this.words = ""
    this.chosen = ""
    this.widths = columns.map(column => column[1]).join(" ")
    const head = make("div", undefined, "head")
    head.style.gridTemplateColumns = this.widths
    columns.forEach(([title, , , , more], number) => {
      const button = make("button", title, more?.number ? "number" : "")
      button.type = "button"
      button.addEventListener("click", () => this.sort(number))
      head.append(button)
    })
    this.body = make("div", undefined, "body")
    this.space = make("div")
    this.body.append(this.space)
    this.lines = []
    root.append(head, this.body)
    let asked = false
    const draw = () => {
      if (asked) return
      asked = true
      requestAnimationFrame(() => { asked = false; this.draw() })
    }
    this.body.addEventListener("scroll", draw, { passive: true })
    new ResizeObserver(draw).observe(this.body)
  }

  show(rows) {
    this.rows = rows
    this.arrange()
  }

  filter(words) {
    this.words = words.toLowerCase()
    this.arrange()
  }

  sort(number) {
    this.down = this.sorted === number ? !this.down : Boolean(this.columns[number][4]?.number)
    this.sorted = number
    this.arrange()
  }

  arrange() {
    let rows = this.rows
    if (this.words) {
      rows = rows.filter(row => this.columns.some(([, , , text]) => text(row).toLowerCase().includes(this.words)))
    }
    if (this.sorted !== null) {
      const value = this.columns[this.sorted][2]
      const sign = this.down ? -1 : 1
      rows = [...rows].sort((a, b) => {
        const x = value(a) ?? -1, y = value(b) ?? -1
        return x < y ? -sign : x > y ? sign : 0
      })
    }
    this.shown = rows
    this.draw()
  }

  // Only the rows that are seen are in the page, and some above and below.
  draw() {
    const height = `${this.shown.length * ROW}px`
    if (this.space.style.height !== height) this.space.style.height = height
    const seen = Math.ceil(this.body.clientHeight / ROW)
    // There may be fewer rows than were there when it was scrolled.
    const top = Math.min(Math.floor(this.body.scrollTop / ROW), this.shown.length - seen)
    const first = Math.max(0, top - SPARE)
    const last = Math.min(this.shown.length, first + seen + 2 * SPARE)
    while (this.lines.length < last - first) this.lines.push(this.line())
    while (this.lines.length > last - first) this.lines.pop().remove()
    for (let place = first; place < last; place += 1) {
      // A row keeps its element while it scrolls.
      const line = this.lines[place % this.lines.length]
      const row = this.shown[place]
      line.row = row
      const move = `translateY(${place * ROW}px)`
      if (line.style.transform !== move) line.style.transform = move
      line.classList.toggle("chosen", this.keyOf(row) === this.chosen)
      this.columns.forEach(([, , , text, more], number) => {
        const cell = line.children[number]
        write(cell, text(row))
        const look = more?.look?.(row)
        if (look !== undefined && look !== cell.className) cell.className = look
      })
    }
  }

  line() {
    const line = make("div", undefined, "row")
    line.style.gridTemplateColumns = this.widths
    line.style.top = "0"
    line.tabIndex = 0
    for (const [, , , , more] of this.columns) line.append(make("span", "", more?.number ? "number" : ""))
    const choose = () => { if (this.onClick && line.row) this.onClick(line.row) }
    line.addEventListener("click", choose)
    line.addEventListener("keydown", event => { if (event.key === "Enter") choose() })
    this.body.append(line)
    return line
  }
}

const lookOf = state => state === "ready" || state === "up" ? "good" : ["down", "lost", "gone", "silent"].includes(state) ? "bad" : ""
const number = { number: true }
const field = (title, width, place, text, more) => [title, width, row => row[place], row => text(row[place]), more]
const words = value => value == null ? "" : String(value)

const parts = new Table(element("parts"), [
  field("part", "minmax(120px,2fr)", PART.name, words),
  field("pid", "70px", PART.run, words, number),
  field("state", "60px", PART.state, words, { look: row => lookOf(row[PART.state]) }),
  ["processes", "90px", row => row[PART.ready], row => row[PART.all] ? `${row[PART.ready]} of ${row[PART.all]}` : "", number],
  field("env steps/s", "90px", PART.rate, plain, number),
  field("faults", "70px", PART.faults, plain, number),
  field("restarts", "70px", PART.restarts, plain, number),
  field("command", "minmax(120px,3fr)", PART.command, words),
], row => `${row[PART.run]}|${row[PART.name]}|`, row => open(row[PART.run], row[PART.name], ""))

const envsOf = row => row[PROCESS.end] <= row[PROCESS.first] ? ""
  : row[PROCESS.end] === row[PROCESS.first] + 1 ? String(row[PROCESS.first]) : `${row[PROCESS.first]}–${row[PROCESS.end] - 1}`

const processes = new Table(element("processes"), [
  field("process", "minmax(110px,2fr)", PROCESS.name, words),
  field("part", "minmax(110px,2fr)", PROCESS.part, words),
  field("pid", "70px", PROCESS.pid, words, number),
  field("state", "70px", PROCESS.state, words, { look: row => lookOf(row[PROCESS.state]) }),
  ["envs", "90px", row => row[PROCESS.first], envsOf, number],
  field("env steps/s", "90px", PROCESS.rate, plain, number),
  field("stalled", "70px", PROCESS.stalled, seconds, { number: true, look: row => row[PROCESS.stalled] > 2 ? "number bad" : "number" }),
  field("life", "50px", PROCESS.incarnation, words, number),
  field("cores", "60px", PROCESS.cpu, cores, number),
  field("memory", "90px", PROCESS.memory, bytes, number),
], row => `${row[PROCESS.run]}|${row[PROCESS.part]}|${row[PROCESS.name]}`, row => open(row[PROCESS.run], row[PROCESS.part], row[PROCESS.name]))

element("filter").addEventListener("input", event => processes.filter(event.target.value))

// --- plots --------------------------------------------------------------------------------------

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name)

class Plot {
  // lines: [name, place in a point, colour]
  constructor(title, text, lines, steps) {
    this.lines = lines
    this.text = text
    this.now = Date.now() / 1e3
    this.begin = this.now - SECONDS
    this.box = make("div", undefined, "plot")
    this.title = make("p", title)
    this.value = make("b")
    this.title.append(" ", this.value)
    this.box.append(this.title)
    element("plots").append(this.box)
    const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" }
    this.plot = new uPlot({
      width: Math.max(this.box.clientWidth, 200),
      height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false } },
      scales: { x: { range: () => [this.begin, this.now] }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, size: 24, space: 70, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 62, ...(steps && { incrs: steps }), values: (_, ticks) => ticks.map(text) }],
      series: [{}, ...lines.map(([name, , ink]) => ({ label: name, stroke: () => colour(ink), width: 1.5, points: { show: false } }))],
      hooks: { setCursor: [plot => this.tell(plot.cursor.idx)] },
    }, [[], ...lines.map(() => [])], this.box)
    new ResizeObserver(() => {
      const width = this.box.clientWidth
      if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT })
    }).observe(this.box)
  }

  show(points) {
    this.now = points.length ? points[points.length - 1][0] : Date.now() / 1e3
    // A minute at least, ten at most.
    this.begin = Math.max(this.now - SECONDS, Math.min(points.length ? points[0][0] : this.now, this.now - 60))
    this.plot.setData([points.map(point => point[0]), ...this.lines.map(([, place]) => points.map(point => point[place]))])
    this.tell(this.plot.cursor.idx)
  }

  // What is under the pointer, or the newest.
  tell(under) {
    const data = this.plot?.data
    if (!data || !data[0].length) return
    const at = under ?? data[0].length - 1
    const told = this.lines.map(([name], line) => `${name ? name + " " : ""}${this.text(data[line + 1][at])}`).join(", ")
    write(this.value, under == null ? told : `${told} at ${clock(data[0][at])}`)
  }
}

const plots = [
  new Plot("env steps/s", plain, [["", 1, "--accent"]]),
  new Plot("CPU cores", cores, [["", 2, "--accent"]]),
  new Plot("memory", bytes, [["", 3, "--accent"]], Array.from({ length: 40 }, (_, power) => 2 ** (power + 10))),
  new Plot("get_action", milliseconds, [["p50", 4, "--accent"], ["p99", 5, "--second"]]),
]
const latencies = plots[3]
let points = []

function drawPlots() {
  // Without a bridge nobody asks for actions.
  latencies.box.hidden = !points.some(point => point[4] != null)
  for (const plot of plots) if (!plot.box.hidden) plot.show(points)
}

// --- faults as a time line ----------------------------------------------------------------------

const causeOf = fault => CAUSES.includes(fault[FAULT.cause]) ? fault[FAULT.cause] : "other"
const describe = fault => `${clock(fault[FAULT.at])} ${fault[FAULT.process]}${fault[FAULT.env] >= 0 ? `, env ${fault[FAULT.env]}` : ""}, ${fault[FAULT.cause]}: ${fault[FAULT.message]}`
const dots = new Map()
let faults = []
let now = 0
let told = null

for (const cause of CAUSES) element("causes").append(make("span", undefined, `dot ${cause}`), cause)

function drawFaults() {
  const chosen = Number(element("window").value)
  const begin = chosen ? now - chosen : Math.min(now - 1, ...faults.map(fault => fault[FAULT.at]))
  const kept = new Set()
  for (const fault of faults) {
    if (fault[FAULT.at] < begin) continue
    const key = JSON.stringify(fault.slice(0, FAULT.message))
    let dot = dots.get(key)
    if (!dot) {
      dot = make("button", undefined, causeOf(fault))
      dot.type = "button"
      dot.title = describe(fault)
      dot.setAttribute("aria-label", dot.title)
      dot.addEventListener("click", () => { told = fault; tellFault() })
      dot.addEventListener("mouseenter", () => write(element("fault"), describe(fault)))
      dot.addEventListener("mouseleave", tellFault)
      dots.set(key, dot)
      element("line").append(dot)
    }
    dot.style.left = `${100 * (fault[FAULT.at] - begin) / (now - begin)}%`
    kept.add(key)
  }
  for (const [key, dot] of dots) if (!kept.has(key)) { dot.remove(); dots.delete(key) }
  if (!element("line").matches(":hover")) tellFault()
}

// The one that was clicked, or the newest.
function tellFault() {
  const fault = told ?? faults[faults.length - 1]
  write(element("fault"), fault ? describe(fault) : "no faults")
}

element("window").addEventListener("change", drawFaults)

// --- what was clicked ---------------------------------------------------------------------------

let panel = null
let asking = false
let isBridge = false

const sumOf = calls => Object.values(calls).reduce((sum, count) => sum + count, 0)

const episodes = new Table(element("panel-episodes"), [
  field("episode", "minmax(90px,2fr)", EPISODE.id, words),
  field("client", "minmax(80px,2fr)", EPISODE.client, words),
  ["state", "80px", row => row[EPISODE.waits], row => !row[EPISODE.isThere] ? "away" : row[EPISODE.waits] ? "waits" : "acts"],
  ["calls", "70px", row => sumOf(row[EPISODE.calls]), row => plain(sumOf(row[EPISODE.calls])), number],
  field("queued", "60px", EPISODE.queued, words, number),
], row => row[EPISODE.id], row => { episodes.chosen = row[EPISODE.id]; episodes.draw(); tellEpisode() })

// The verbs of the one that was clicked.
function tellEpisode() {
  if (!episodes.chosen) return
  const row = episodes.rows.find(row => row[EPISODE.id] === episodes.chosen)
  const calls = row ? Object.entries(row[EPISODE.calls]).map(([verb, count]) => `${verb}: ${count}`).join("\n") : "it is over"
  element("panel-text").hidden = false
  write(element("panel-text"), `episode ${episodes.chosen}\n${calls || "no call yet"}`)
}

async function refreshEpisodes(asked) {
  const reply = await fetch(`/episodes?${query()}`)
  if (!reply.ok || panel !== asked) return
  const rows = await reply.json()
  if (panel !== asked) return
  element("panel-episodes").hidden = false
  episodes.show(rows)
  tellEpisode()
}

// The end of what the process wrote to stderr; told at each frame while it is open.
async function refreshLog(asked) {
  const told = await fetch(`/log?${query()}`).then(reply => reply.text())
  if (panel !== asked) return
  const text = element("panel-log-text")
  const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4
  write(text, told)
  // Who has scrolled up reads.
  if (isAtEnd) text.scrollTop = text.scrollHeight
}

function query(more) {
  return new URLSearchParams({ run: panel.run, part: panel.part, process: panel.process, ...more }).toString()
}

function open(run, part, process) {
  panel = { run, part, process }
  parts.chosen = processes.chosen = `${run}|${part}|${process}`
  parts.draw()
  processes.draw()
  write(element("panel-title"), process ? `${process} of ${part}` : part)
  element("panel-text").hidden = true
  hidePicture()
  element("panel-actions").replaceChildren()
  element("panel-body").replaceChildren()
  element("panel").hidden = false
  if (process) addAction("stacks", showStacks)
  const row = newest?.processes.find(row => processes.keyOf(row) === processes.chosen)
  if (row && row[PROCESS.end] > row[PROCESS.first]) {
    const env = make("input")
    env.type = "number"
    env.min = env.value = row[PROCESS.first]
    env.max = row[PROCESS.end] - 1
    env.setAttribute("aria-label", "env")
    element("panel-actions").append(env)
    addAction("picture of this env", () => showPicture(env.value))
  }
  episodes.show([])
  episodes.chosen = ""
  element("panel-episodes").hidden = true
  element("panel-log").hidden = !process
  write(element("panel-log-text"), "")
  refresh()
}

function close() {
  panel = null
  parts.chosen = processes.chosen = ""
  parts.draw()
  processes.draw()
  element("panel").hidden = true
}

function addAction(title, act) {
  const button = make("button", title)
  button.type = "button"
  button.addEventListener("click", act)
  element("panel-actions").append(button)
  return button
}

async function showStacks() {
  const asked = panel
  const text = element("panel-text")
  hidePicture()
  text.hidden = false
  write(text, "asking ...")
  const answer = await fetch(`/stacks?${query()}`, { method: "POST" }).then(reply => reply.text()).catch(String)
  if (panel === asked) write(text, answer)
}

// The env whose last observation is shown, and loaded again with each frame; null: none.
let pictured = null
let isLoading = false

function showPicture(env) {
  pictured = env
  loadPicture()
}

function loadPicture() {
  const asked = panel
  const env = pictured
  const picture = element("panel-picture")
  const text = element("panel-text")
  const isWanted = () => panel === asked && pictured === env
  isLoading = true
  picture.onload = () => {
    isLoading = false
    if (!isWanted()) return
    picture.hidden = false
    text.hidden = true
  }
  picture.onerror = () => {
    isLoading = false
    if (!isWanted()) return
    hidePicture()
    text.hidden = false
    write(text, `The last observation of env ${env} is no picture, or its run does not answer.`)
  }
  picture.alt = `last observation of env ${env}`
  picture.src = `/picture?${query({ env, at: Date.now() })}`
}

function hidePicture() {
  pictured = null
  element("panel-picture").hidden = true
}

function list(pairs) {
  const node = make("dl")
  for (const [name, value] of pairs) node.append(make("dt", name), make("dd", value))
  return node
}

async function refresh() {
  if (!panel || asking) return
  const asked = panel
  asking = true
  try {
    const reply = await fetch(`/details?${query()}`)
    const body = reply.ok ? drawDetails(await reply.json()) : [make("p", await reply.text())]
    if (panel === asked) element("panel-body").replaceChildren(...body)
    if (panel === asked && isBridge) await refreshEpisodes(asked)
    if (panel === asked && asked.process && element("panel-log").open) await refreshLog(asked)
    if (panel === asked && pictured !== null && !isLoading) loadPicture()
  } catch {
    // The dashboard has ended, which the page says above.
  } finally {
    asking = false
  }
  if (panel && panel !== asked) refresh()
}

function drawDetails(told) {
  isBridge = "episodes_now" in (told.levels ?? {})
  const nodes = [list([["command", told.command], ["envbus", told.version]])]
  if (panel.process) {
    nodes.push(list([
      ["process id", words(told.pid)], ["state", told.state], ["life", words(told.incarnation)],
      ["envs", told.end > told.first ? `${told.first}–${told.end - 1}` : "none"],
      ["env steps", words(told.env_steps)], ["env steps/s", plain(told.rate)],
      ["stalled", seconds(told.stalled) || "no"], ["CPU cores", cores(told.cpu)], ["memory", bytes(told.memory)],
    ]))
  } else {
    const counts = Object.entries(told.counts).map(([name, [count, rate]]) => [name, rate ? `${words(count)} (${plain(rate)}/s)` : words(count)])
    if (counts.length) nodes.push(make("h3", "counts"), list(counts))
    const levels = Object.entries(told.levels).map(([name, level]) => [name, Number.isInteger(level) ? String(level) : level.toPrecision(4)])
    if (levels.length) nodes.push(make("h3", "now"), list(levels))
    const times = Object.entries(told.latencies).map(([name, [count, median, slowest]]) => [name, `p50 ${milliseconds(median)}, p99 ${milliseconds(slowest)}, ${plain(count)} in all`])
    if (times.length) nodes.push(make("h3", "times"), list(times))
  }
  if (told.faults.length) {
    const items = make("ul")
    for (const fault of told.faults.slice(-20).reverse()) items.append(make("li", describe(fault)))
    nodes.push(make("h3", "latest faults"), items)
  }
  return nodes
}

element("panel-log").addEventListener("toggle", refresh)
element("panel-close").addEventListener("click", close)
document.addEventListener("keydown", event => { if (event.key === "Escape" && panel) close() })

// --- what comes ---------------------------------------------------------------------------------

function status(text, lost) {
  write(element("status"), text)
  element("status").classList.toggle("lost", lost)
}

let newest = null
let dueFrame = false

function draw() {
  dueFrame = false
  const frame = newest
  if (!frame) return
  const totals = frame.totals
  write(element("steps"), plain(totals.steps))
  write(element("up"), `${totals.ready} of ${totals.processes}`)
  write(element("faults"), plain(totals.faults))
  write(element("restarts"), plain(totals.restarts))
  write(element("cpu"), cores(totals.cpu))
  write(element("memory"), bytes(totals.memory))
  const silent = totals.silent ? `, ${totals.silent} without an answer` : ""
  status(`${totals.runs} run${totals.runs === 1 ? "" : "s"}${silent}, ${clock(frame.at)}`, false)
  parts.show(frame.parts)
  processes.show(frame.processes)
  faults = frame.faults
  now = frame.at
  drawFaults()
  drawPlots()
}

function take(frame) {
  newest = frame
  while (points.length && points[points.length - 1][0] >= frame.at) points.pop() // its clock was put back
  points.push(frame.point)
  if (points.length > SECONDS) points.shift()
  // A page that is not seen draws nothing; one that is slow draws the newest.
  if (!dueFrame && !document.hidden) {
    dueFrame = true
    requestAnimationFrame(draw)
  }
  if (!document.hidden) refresh()
}

function connect() {
  const source = new EventSource("/events")
  source.addEventListener("points", event => { points = JSON.parse(event.data) })
  source.addEventListener("frame", event => take(JSON.parse(event.data)))
  source.addEventListener("error", () => {
    status("no connection: the dashboard has ended, or too many browsers look", true)
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000)
  })
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) draw() })

// --- dark and light -----------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)")

function theme() {
  const kept = localStorage.getItem("theme")
  document.documentElement.dataset.theme = kept ?? (system.matches ? "dark" : "light")
  for (const plot of plots) plot.plot.redraw(false)
}

element("theme").addEventListener("click", () => {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark")
  theme()
})
system.addEventListener("change", theme)

// The token has done its work: the address is not to show it.
history.replaceState(null, "", "/")
theme()
connect()
