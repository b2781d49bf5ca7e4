// Versions of a model, in words that tell them apart.

import { get } from "./api.js";
import { bytes, percent } from "./dom.js";

const versions = new Map(); // of each model that was asked for

/** The versions of a model beside its default one, the newest first. None if the server does not tell. */
export function versionsOf({ id, version }) {
  if (!versions.has(id)) {
    const asked = get(`/models/${id}`).then((facts) => facts.versions, () => []);
    versions.set(id, asked);
  }
  return versions.get(id).then((all) => all.filter((one) => one.version !== version));
}

/** Forget what an earlier key was told. */
export function forgetVersions() {
  versions.clear();
}

/** Devices with a graph and a replica, else all with a graph: [name, facts] each. */
export function usableDevices({ devices }) {
  const all = Object.entries(devices);
  const usable = all.filter(([, { available }]) => available);
  return usable.length ? usable : all;
}

/** Such as "pruned 40 %, int8, 19.5 MB". */
export function describeVersion(facts) {
  const graphs = usableDevices(facts).map(([device, graph]) => `${nameGraph(device, graph)}, ${bytes(graph.size_bytes)}`);
  return [namePruning(facts), graphs.join(" or ")].filter(Boolean).join(", ");
}

/** Such as "pruned 40 %, int8": a version on one device. */
export function describeGraph(facts, device) {
  return [namePruning(facts), nameGraph(device, facts.devices[device])].filter(Boolean).join(", ");
}

function namePruning({ pruned }) {
  return pruned && `pruned ${percent(pruned, 0)}`;
}

/** The precision, and what else is in the name of the graph: "fp16 tensorrt" of gpu-fp16-tensorrt. */
function nameGraph(device, { candidate, precision }) {
  const others = candidate.split("-").filter((word) => word !== device && word !== precision);
  return [precision, ...others].join(" ");
}
