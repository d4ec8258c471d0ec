// The drop zone: a photo's bytes go to the server as they are, as base64; nothing of them is opened here.
const most = props.most;
const put = (value) => { props.value = value; trigger('upload'); };
const take = (file) => {
  if (file.size > most) return put('large:' + file.size);
  const reader = new FileReader();
  reader.onload = () => put('data:;base64,' + (reader.result.split(',')[1] || ''));
  reader.readAsDataURL(file);
};
const first = (transfer) => [...(transfer ? transfer.files : [])].slice(0, 1).forEach(take);
element.addEventListener('change', (event) => { first(event.target); event.target.value = ''; });
element.addEventListener('dragover', (event) => { event.preventDefault(); element.classList.add('v-over'); });
element.addEventListener('dragleave', () => element.classList.remove('v-over'));
element.addEventListener('drop', (event) => {
  event.preventDefault();
  element.classList.remove('v-over');
  first(event.dataTransfer);
});
element.addEventListener('click', (event) => {
  const example = event.target.closest('[data-example]');
  if (example) put('example:' + example.dataset.example);
});
if (props.pastes) document.addEventListener('paste', (event) => first(event.clipboardData));
