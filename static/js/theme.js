// Runs before the first paint, as a classic script: sets data-theme so that nothing flashes.
(() => {
  try {
    const theme = localStorage.getItem("pagedeck.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // No storage (private mode): follow the system.
  }
})();
