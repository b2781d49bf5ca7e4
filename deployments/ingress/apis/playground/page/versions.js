// Versions of a model, and descriptions that distinguish them.

import { get } from "./api.js";
import { bytes, percent } from "./dom.js";

const versions = new Map(); // promises of the versions, by model id

/** Return the versions besides the default version, newest first; empty if the request fails. The next call repeats it. */
export function versionsOf({ id, version }) {
  if (!versions.has(id)) {
    const failed = () => {
      if (versions.get(id) === asked) versions.delete(id);
      return [];
    };
    const asked = get(`/models/${id}`).then((facts) => facts.versions, failed);
    versions.set(id, asked);
  }
  return versions.get(id).then((all) => all.filter((one) => one.version !== version));
}

/** Clear the cache, because another API key may permit other versions. */
export function forgetVersions() {
  versions.clear();
}

/** Return [name, facts] of the devices with a graph: the available ones, or all if none is. */
export function usableDevices({ devices }) {
  const all = Object.entries(devices);
  const usable = all.filter(([, { available }]) => available);
  return usable.length ? usable : all;
}

/** Describe a version, such as "pruned 40 %, int8, 19.5 MB". */
export function describeVersion(facts) {
  const graphs = usableDevices(facts).map(([device, graph]) => `${nameGraph(device, graph)}, ${bytes(graph.size_bytes)}`);
  return [namePruning(facts), graphs.join(" or ")].filter(Boolean).join(", ");
}

/** Describe a version on one device, such as "pruned 40 %, int8". */
export function describeGraph(facts, device) {
  return [namePruning(facts), nameGraph(device, facts.devices[device])].filter(Boolean).join(", ");
}

function namePruning({ pruned }) {
  return pruned && `pruned ${percent(pruned, 0)}`;
}

/** Return the precision and other parts of the name: "fp16 tensorrt" for gpu-fp16-tensorrt. */
function nameGraph(device, { candidate, precision }) {
  const others = candidate.split("-").filter((word) => word !== device && word !== precision);
  return [precision, ...others].join(" ");
}
