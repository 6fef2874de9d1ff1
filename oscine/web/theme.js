// Runs before the first paint, so that a chosen theme never flashes the other one. "system" follows the machine.
document.documentElement.dataset.theme = localStorage.getItem("oscine.theme") ?? "system";
